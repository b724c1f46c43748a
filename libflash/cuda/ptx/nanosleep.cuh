// A thread that does nothing for a while.
#pragma once

#include <cstdint>

namespace libflash::cuda {

// Something like so many nanoseconds, up to twice as many.
__device__ __forceinline__ void nanosleep(uint32_t nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }

}  // namespace libflash::cuda
