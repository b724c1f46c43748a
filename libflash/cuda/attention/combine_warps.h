// The warps of a thread block of combine (combine_splits.cuh) and how they share the splits, for the plan and the kernels.
// No CUDA header.
#pragma once

#include <cstdint>

namespace libflash::cuda {

constexpr int combine_warps(int head_dim_v) { return head_dim_v > 256 ? 8 : 4; }
// The splits of a group of 32 that each warp adds up, where all warps share a row. With no more splits than these, the loads of
// one row do not keep a thread block busy, so that each warp may compute one (combine_few_splits.cuh).
constexpr int splits_of_warp(int head_dim_v) { return 32 / combine_warps(head_dim_v); }
constexpr bool are_few_splits(int64_t splits, int head_dim_v) { return splits <= splits_of_warp(head_dim_v); }

}  // namespace libflash::cuda
