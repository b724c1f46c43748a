// The interface of the CPU backend: one table of entry points for each instruction set, all compiled from the same source
// (engine/), and one for the scalar reference.
#pragma once

#include <cstddef>

#include "cpu/cancel.h"
#include "cpu/thread_count.h"
#include "problem/attention.h"
#include "problem/cache_write.h"
#include "problem/decode.h"
#include "problem/merge.h"
#include "problem/tangent.h"

namespace libflash::cpu {

// The plan of a CPU call, made by plan_*() of the kernel that runs it.
struct Plan {
    int threads = 1;
    // The most threads that the call may use; `threads` is the number that its amount of work justifies.
    int most_threads = 1;
    int tile_q = 0, tile_k = 0;
    int64_t num_splits = 1;
    int64_t key_chunks = 1;  // backward: ranges of keys with a dQ accumulator each, summed at the end
    int64_t segment = 0;     // decode with FLASH_FLAG_INVARIANT_ROWS: keys of a segment
    size_t workspace_bytes = 0;
};

// The version of the order of sums of decode with FLASH_FLAG_INVARIANT_ROWS. A change of that order is a new version.
constexpr int kInvariantVersion = 1;

// The kernels of one instruction set. The operations take a workspace of plan.workspace_bytes, aligned to at
// least 64 bytes (nullptr if 0).
struct Kernels {
    const char* isa;   // "avx512bf16", "avx512", "avx2", "neonbf16", "neon", "generic", "scalar"
    bool (*usable)();  // whether this processor can run it
    Plan (*plan_forward)(const AttentionProblem&);
    void (*forward)(const AttentionProblem&, const Plan&, void* workspace);
    Plan (*plan_backward)(const AttentionProblem&);
    void (*backward)(const AttentionProblem&, const Plan&, void* workspace);
    Plan (*plan_decode)(const DecodeProblem&);
    void (*decode)(const DecodeProblem&, const Plan&, void* workspace);
    Plan (*plan_forward_tangent)(const TangentProblem&);
    void (*forward_tangent)(const TangentProblem&, const Plan&, void* workspace);
    Plan (*plan_backward_tangent)(const TangentProblem&);
    void (*backward_tangent)(const TangentProblem&, const Plan&, void* workspace);
};

// All kernels of this build in order of preference, the scalar reference last. `count` receives their number.
const Kernels* const* all_kernels(int* count);

// The first kernels of that list that this processor can run.
const Kernels& best_kernels();

void merge(const MergeProblem&);
void write_cache(const CacheWriteProblem&);  // append.cpp
// Converts a dense block mask to lists; all arrays are contiguous. Either pair of lists may be nullptr.
void compress_block_mask(const uint8_t* mask, int64_t matrices, int64_t rows, int64_t cols, int32_t* row_counts,
                         int32_t* row_indices, int32_t* col_counts, int32_t* col_indices);

}  // namespace libflash::cpu
