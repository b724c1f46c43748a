// Asynchronous copies from global to shared memory (sm_80), committed in groups, and plain loads and stores by an address in
// shared memory.
#pragma once

#include <cstdint>

namespace libflash::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void store_shared(uint32_t smem_address, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem_address), "r"(x) : "memory");
}

__device__ __forceinline__ void store_zeros_16(uint32_t smem_address) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(smem_address), "r"(0) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t smem_address, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(smem_address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// The compiler does not move this load ahead of a wait.
__device__ __forceinline__ float4 load_shared_16(uint32_t smem_address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(smem_address)
                 : "memory");
    return x;
}

__device__ __forceinline__ uint32_t load_shared(uint32_t smem_address) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(smem_address));
    return x;
}

// As load_shared_16() and store_shared_16(), for words.
__device__ __forceinline__ uint4 load_shared_words(uint32_t smem_address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(smem_address)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store_shared_words(uint32_t smem_address, const uint4& x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem_address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// Copies 16 bytes if `valid`. Otherwise writes 16 zero bytes and does not read `global`, which may then be any address.
__device__ __forceinline__ void cp_async_16(uint32_t smem_address, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem_address), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

// The same with 8 bytes.
__device__ __forceinline__ void cp_async_8(uint32_t smem_address, const void* global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(smem_address), "l"(global), "r"(valid ? 8 : 0) : "memory");
}

// Copies 4 bytes.
__device__ __forceinline__ void cp_async_4(uint32_t smem_address, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address), "l"(global) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `kPending` youngest groups of this thread are incomplete.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace libflash::cuda
