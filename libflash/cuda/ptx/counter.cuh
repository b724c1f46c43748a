// Counters in global memory, by which a thread block learns that other thread blocks have written their data.
#pragma once

namespace libflash::cuda {

// Waits until a counter has the value `value`. What another thread wrote before set_count(), including its completed bulk
// additions (tma.cuh), is then visible to this thread and to the bulk additions that this thread issues.
__device__ __forceinline__ void wait_for_count(const int* counter, int value) {
    int x;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
    } while (x != value);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Sets a counter for wait_for_count(). Everything that the thread wrote before, including its completed bulk additions, becomes
// visible before the counter.
__device__ __forceinline__ void set_count(int* counter, int value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

// Adds 1 to a counter and returns its previous value. What other threads wrote before their additions is then visible to this
// thread; what this thread wrote before becomes visible to those that add later.
__device__ __forceinline__ int add_to_count(int* counter) {
    int previous;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(previous) : "l"(counter) : "memory");
    return previous;
}

}  // namespace libflash::cuda
