// What the rest of the library sees of the CPU backend: for each instruction set one table of entry points, built from one source
// compiled once per target (engine/), and the scalar truth beside them.
#pragma once

#include <cstddef>

#include "cpu/cancel.h"
#include "cpu/thread_count.h"
#include "problem/attention.h"
#include "problem/decode.h"
#include "problem/merge.h"

namespace libflash::cpu {

// How a CPU call will be done; made by plan_*() of the same table entry, printed by explain.
struct Plan {
    int threads = 1;
    int most_threads = 1;  // that the call may have; `threads` is what its work is worth
    int tile_q = 0, tile_k = 0;
    int64_t num_splits = 1;
    int64_t key_chunks = 1;  // backward: ranges of keys with a query gradient of their own, added up at the end
    size_t workspace_bytes = 0;
};

// One instruction set. `forward`, `backward` and `decode` take a workspace of plan.workspace_bytes, aligned to 64 or more
// (nullptr if 0).
struct Kernels {
    const char* isa;   // "avx512bf16", "avx512", "avx2", "generic", "scalar"
    bool (*usable)();  // can this processor run it
    Plan (*plan_forward)(const AttentionProblem&);
    void (*forward)(const AttentionProblem&, const Plan&, void* workspace);
    Plan (*plan_backward)(const AttentionProblem&);
    void (*backward)(const AttentionProblem&, const Plan&, void* workspace);
    Plan (*plan_decode)(const DecodeProblem&);
    void (*decode)(const DecodeProblem&, const Plan&, void* workspace);
};

// In order of preference, the scalar truth last. `count` receives the length.
const Kernels* const* all_kernels(int* count);

// The first usable one that is not the scalar truth.
const Kernels& best_kernels();

void merge(const MergeProblem&);
// Dense block mask to lists; everything contiguous. Either pair of lists may be nullptr.
void compress_block_mask(const uint8_t* mask, int64_t matrices, int64_t rows, int64_t cols, int32_t* row_counts,
                         int32_t* row_indices, int32_t* col_counts, int32_t* col_indices);

}  // namespace libflash::cpu
