// Counters in global memory, by which thread blocks learn that others have written: everything that a thread wrote before it
// counts, its completed bulk additions included, is visible to a thread that sees the count and then calls acquire_counted().
// There, load_counted() reads it.
#pragma once

namespace libflash::cuda {

// Subtracts 1 from a counter above 0. Returns the value before. (Not an addition: the compiler would sum up those of a warp and
// wait for the value to divide it among the lanes.)
__device__ __forceinline__ int count_down(int* counter) {
    int before;
    asm volatile("atom.release.gpu.global.dec.u32 %0, [%1], 0xffffffff;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

__device__ __forceinline__ void acquire_counted() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

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

// Reads four floats from L2, where additions take place.
__device__ __forceinline__ float4 load_counted(const float* four) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(four)
                 : "memory");
    return x;
}

}  // namespace libflash::cuda
