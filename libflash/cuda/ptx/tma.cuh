// TMA of sm_90: copies between global and shared memory, and additions to global memory. A copy moves consecutive bytes, or a box
// of a four-dimensional tensor that a tensor map describes. One thread issues a copy. Elements outside the tensor are read as
// zeros and not written. Coordinates count elements, innermost dimension first, and are not negative.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace libflash::cuda {

// The map must be a kernel parameter (__grid_constant__); its address identifies it.
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// `barrier` counts the bytes of the whole box, including elements outside the tensor.
__device__ __forceinline__ void tma_load(uint32_t smem_address, const CUtensorMap& map, const MBarrier& barrier, int c0, int c1,
                                         int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
            "r"(smem_address),
        "l"(&map), "r"(barrier.address), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// The same for several thread blocks of the cluster (bit n of `ranks`: thread block n). The box goes to the same address in each
// of them, and completes on the barrier with the same address there.
__device__ __forceinline__ void tma_load_to(uint32_t ranks, uint32_t smem_address, const CUtensorMap& map,
                                            const MBarrier& barrier, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address),
        "l"(&map), "r"(barrier.address), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<uint16_t>(ranks))
        : "memory");
}

// Copies `bytes` consecutive bytes, a multiple of 16, between 16-byte aligned addresses; no tensor map is needed.
__device__ __forceinline__ void tma_load_bytes(uint32_t smem_address, const void* global, int bytes, const MBarrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address),
                 "l"(global), "r"(bytes), "r"(barrier.address)
                 : "memory");
}

// Prefetches a box into L2.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(c0), "r"(c1), "r"(c2),
                 "r"(c3)
                 : "memory");
}

// Stores a box. Before this, all threads that wrote the box to shared memory call fence_shared_for_async() and pass a barrier.
// The innermost dimension is written in 16-byte units: up to 14 bytes after the end of a row are written as well.
__device__ __forceinline__ void tma_store(uint32_t smem_address, const CUtensorMap& map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(smem_address), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// Adds consecutive floats in shared memory to global memory; `bytes` as for tma_load_bytes. Each addition is atomic: several
// thread blocks may add to the same floats. Subnormal floats count as 0.
__device__ __forceinline__ void tma_add_floats(float* global, uint32_t smem_address, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(smem_address),
                 "r"(bytes)
                 : "memory");
}

// Makes this thread's stores and additions since the last commit a group.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most `kPending` of this thread's groups have yet to read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until at most `kPending` of this thread's groups are incomplete; the writes of its other groups are visible to this
// thread.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace libflash::cuda
