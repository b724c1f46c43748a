// The named barriers of the consumers of the sm_90a decode kernel.
#pragma once

namespace libflash::cuda::sm90 {

// All consumers; P of a warpgroup is ready (one for each); the warps of a warpgroup (one for each).
constexpr int kAllConsumers = 1, kReadyBarrier = 2, kGroupBarrier = 4;

}  // namespace libflash::cuda::sm90
