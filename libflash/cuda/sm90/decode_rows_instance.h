// The sm_90a decode kernel for many rows of a key head: which calls it is for, and its instances, for the plan and the kernel. No
// CUDA header.
#pragma once

#include "cuda/config.h"
#include "cuda/plans.h"

namespace libflash::cuda::sm90 {

// The query rows of a key head, those of all its heads together, from which on this kernel is preferred. With fewer the sm80
// kernel takes one tile of 16 rows, as it does for a single one.
constexpr int64_t kFewestDecodeRows = 17;

// Of kernels.table: that for values in the keys, else this one.
constexpr bool has_values_in_keys(const KernelConfig& config) { return config.head_dim != config.head_dim_v; }

// An instance is numbered by its consumer warpgroups of 64 rows. Two share the keys, which are read from L2 half as often.
constexpr Instance kDecodeOf64Rows{1, "64 rows"}, kDecodeOf128Rows{2, "128 rows"};

// Two thread blocks with one warpgroup run at once on a multiprocessor: while one of them begins or ends, the other one loads.
// One thread block with two warpgroups has as many stages as they have together.
constexpr int decode_rows_blocks_at_once(int warpgroups) { return warpgroups == 1 ? 2 : 1; }
constexpr int decode_rows_stages(const KernelConfig& config, int warpgroups) { return config.stages * warpgroups; }

}  // namespace libflash::cuda::sm90
