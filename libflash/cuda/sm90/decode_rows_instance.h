// The sm_90a decode kernel for many rows of a key head: which calls it is for, and its instances, for the plan and the kernel. No
// CUDA header.
#pragma once

#include "cuda/config.h"
#include "cuda/plans.h"

namespace libflash::cuda::sm90 {

// From this number of rows of a key head on (query rows times the query heads that share the key head), this kernel is preferred.
// With fewer rows the sm80 kernel has one tile of 16 rows, which takes no longer than a single row.
constexpr int64_t kFewestDecodeRows = 17;

// Whether a kernel of kernels.table is the kernel for values in the keys; otherwise it is the kernel for many rows.
constexpr bool has_values_in_keys(const KernelConfig& config) { return config.head_dim != config.head_dim_v; }

// The number of an instance is its number of consumer warpgroups of 64 rows. Two warpgroups share the keys, which are then read
// from L2 half as often.
constexpr Instance kDecodeOf64Rows{1, "64 rows"}, kDecodeOf128Rows{2, "128 rows"};

// Two thread blocks with one warpgroup run at once on a multiprocessor: while one of them begins or ends, the other one loads.
// One thread block with two warpgroups has as many stages as two thread blocks together.
constexpr int decode_rows_blocks_at_once(int warpgroups) { return warpgroups == 1 ? 2 : 1; }
constexpr int decode_rows_stages(const KernelConfig& config, int warpgroups) { return config.stages * warpgroups; }

}  // namespace libflash::cuda::sm90
