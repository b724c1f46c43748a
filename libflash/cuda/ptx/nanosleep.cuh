// Suspends a thread.
#pragma once

#include <cstdint>

namespace libflash::cuda {

// Sleeps for about `nanoseconds`, at most twice as long.
__device__ __forceinline__ void nanosleep(uint32_t nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }

}  // namespace libflash::cuda
