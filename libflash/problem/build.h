// Makes the checked problem of each operation from the C arguments. All checks that do not depend on the kernel are made here, in
// a fixed order, so that a call with several errors always gets the same message:
//
//   1  the options struct: version, flags, reserved fields, then each plain value in the order of the header
//   2  each tensor alone, in the order of the arguments; then their devices, dtypes and shapes against each other
//   3  the tensors of the options in the same way
//   4  on the CPU, contents of tensors: lengths, block tables, block lists
//   5  overlap of outputs
//
// Later, plan/ refuses what no kernel supports (UNSUPPORTED); after that the workspace is checked.
#pragma once

#include "problem/attention.h"
#include "problem/cache_write.h"
#include "problem/decode.h"
#include "problem/merge.h"
#include "problem/read.h"
#include "problem/tangent.h"

namespace libflash {

AttentionProblem make_forward_problem(const flash_tensor_t* q, const flash_tensor_t* k, const flash_tensor_t* v,
                                      const flash_tensor_t* out, const flash_tensor_t* lse,
                                      const flash_attention_options_t* options, Reading reading);

AttentionProblem make_backward_problem(const flash_tensor_t* dout, const flash_tensor_t* q, const flash_tensor_t* k,
                                       const flash_tensor_t* v, const flash_tensor_t* out, const flash_tensor_t* lse,
                                       const flash_tensor_t* dq, const flash_tensor_t* dk, const flash_tensor_t* dv,
                                       const flash_attention_options_t* options, Reading reading);

// A copy of the caller's struct. A struct_size that no version has is refused with FLASH_STATUS_VERSION.
flash_tangents_t read_tangents(const flash_tangents_t* given);

TangentProblem make_forward_tangent_problem(const flash_tensor_t* q, const flash_tensor_t* k, const flash_tensor_t* v,
                                            const flash_tensor_t* out, const flash_tensor_t* lse,
                                            const flash_tangents_t* tangents, const flash_attention_options_t* options,
                                            Reading reading);

TangentProblem make_backward_tangent_problem(const flash_tensor_t* dout, const flash_tensor_t* q, const flash_tensor_t* k,
                                             const flash_tensor_t* v, const flash_tensor_t* out, const flash_tensor_t* lse,
                                             const flash_tensor_t* dq, const flash_tensor_t* dk, const flash_tensor_t* dv,
                                             const flash_tangents_t* tangents, const flash_attention_options_t* options,
                                             Reading reading);

// `schedule`: with Reading::schedule, where the schedule is to be written; options->schedule is then ignored.
DecodeProblem make_decode_problem(const flash_tensor_t* q, const flash_tensor_t* k_cache, const flash_tensor_t* v_cache,
                                  const flash_tensor_t* out, const flash_tensor_t* lse, const flash_decode_options_t* options,
                                  Reading reading, const flash_tensor_t* schedule = nullptr);

MergeProblem make_merge_problem(const flash_tensor_t* outs, const flash_tensor_t* lses, int32_t count, const flash_tensor_t* out,
                                const flash_tensor_t* lse, const flash_merge_options_t* options);

CacheWriteProblem make_cache_write_problem(const flash_tensor_t* k_new, const flash_tensor_t* v_new,
                                           const flash_tensor_t* k_cache, const flash_tensor_t* v_cache,
                                           const flash_tensor_t* slots, const flash_cache_write_options_t* options,
                                           Reading reading);

// A dense block mask and the lists to write. The pointers of lists that the caller did not give are null.
struct CompressProblem {
    Device device;
    int64_t matrices = 0, rows = 0, cols = 0;
    const uint8_t* mask = nullptr;
    int32_t* row_counts = nullptr;
    int32_t* row_indices = nullptr;
    int32_t* col_counts = nullptr;
    int32_t* col_indices = nullptr;
    Request request;
};

CompressProblem make_compress_problem(const flash_tensor_t* block_mask, const flash_block_lists_t* lists);

}  // namespace libflash
