// Reads that a kernel may do before the previous kernel has ended (dependent_launch.cuh): no result may depend on them.
#pragma once

#include <cstdint>

namespace libflash::cuda {

// Prefetches a line into L2. L2 is coherent: a later write of another kernel updates it there.
__device__ __forceinline__ void prefetch_to_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// Loads a number that another kernel may change at the same time, without caching it in L1.
__device__ __forceinline__ int32_t load_relaxed(const int32_t* global) {
    int32_t x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(global));
    return x;
}

}  // namespace libflash::cuda
