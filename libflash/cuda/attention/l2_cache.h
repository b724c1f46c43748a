// The part of the L2 cache that tile schedules count on. No CUDA header.
#pragma once

namespace libflash::cuda {

// The bytes that the heads of a group may read: they run at the same time and read their data repeatedly, so the data should stay
// in the L2 cache.
constexpr double kL2Bytes = 24e6;

}  // namespace libflash::cuda
