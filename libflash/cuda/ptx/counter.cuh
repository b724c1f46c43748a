// Counters in global memory, by which thread blocks learn that others have written.
#pragma once

namespace libflash::cuda {

// Waits until a counter has a value. What was written before it was set to that, completed bulk additions included, is then
// visible to the thread, also to its bulk additions.
__device__ __forceinline__ void wait_for_count(const int* counter, int value) {
    int x;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
    } while (x != value);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Sets a counter, for wait_for_count(): everything that the thread wrote before comes first, its completed bulk additions
// included.
__device__ __forceinline__ void set_count(int* counter, int value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

}  // namespace libflash::cuda
