// Turns of deterministic=True (backward_fixed_order.cuh): how many a query tile has in each key tile. Host and device.
#pragma once

#include "cuda/config.h"

namespace libflash::cuda::sm90 {

// One, or one per 64 channels where shared memory holds a part of the sums only: the next key tile need not wait until this one
// has computed the other channels.
constexpr int dq_turns(const KernelConfig& config) { return config.tile_k == 64 ? config.head_dim / 64 : 1; }

}  // namespace libflash::cuda::sm90
