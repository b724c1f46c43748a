// What a kernel may read before the one ahead of it has ended (dependent_launch.cuh): no result may depend on it.
#pragma once

#include <cstdint>

namespace libflash::cuda {

// Asks for a line to be brought into the L2 cache, where whoever writes to it later finds it.
__device__ __forceinline__ void prefetch_to_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// A number that may be about to change; no copy of it stays in the L1 cache.
__device__ __forceinline__ int32_t load_relaxed(const int32_t* global) {
    int32_t x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(global));
    return x;
}

}  // namespace libflash::cuda
