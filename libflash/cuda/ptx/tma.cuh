// The copy engine of sm_90: boxes of a tensor of up to four dimensions to shared memory and back, by a map that the host has encoded, and consecutive bytes
// without one; back also as additions. One thread starts a copy. What lies past the end of a dimension is read as zeros and not written; coordinates
// count elements, innermost first, and are not negative.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace libflash::cuda {

// The map is a kernel parameter (__grid_constant__), named by its address.
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// `barrier` is told of the box's bytes, those outside the tensor among them.
__device__ __forceinline__ void tma_load(uint32_t smem_address, const CUtensorMap& map, const MBarrier& barrier, int c0, int c1,
                                         int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
            "r"(smem_address),
        "l"(&map), "r"(barrier.address), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// The same box to the same place in shared memory of each thread block of the cluster whose bit 1 << rank is set in `ranks`; its mbarrier at the place of
// `barrier` is told of the bytes, whether it has announced them yet or not. cluster.cuh says from when to when others may be reached.
__device__ __forceinline__ void tma_load_multicast(uint32_t smem_address, const CUtensorMap& map, const MBarrier& barrier,
                                                   uint16_t ranks, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(smem_address),
        "l"(&map), "r"(barrier.address), "h"(ranks), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// `bytes` consecutive bytes, a multiple of 16 as both addresses are; no map is needed.
__device__ __forceinline__ void tma_load_bytes(uint32_t smem_address, const void* global, int bytes, const MBarrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address),
                 "l"(global), "r"(bytes), "r"(barrier.address)
                 : "memory");
}

// A box into the L2 cache alone.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(c0), "r"(c1), "r"(c2),
                 "r"(c3)
                 : "memory");
}

// After fence_shared_for_async() of those who wrote the box and a barrier. Innermost coordinates go in steps of 16 bytes: up to 14 bytes past the end of a
// row are written as well.
__device__ __forceinline__ void tma_store(uint32_t smem_address, const CUtensorMap& map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(smem_address), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// The same, but the box is added to what the tensor holds, in the map's type, each number by itself: thread blocks may add to the same ones. Floats below the
// normal ones count as 0.
__device__ __forceinline__ void tma_add(uint32_t smem_address, const CUtensorMap& map, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
        "r"(smem_address), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
// Adds consecutive floats; `bytes` as for tma_load_bytes.
__device__ __forceinline__ void tma_add_floats(float* global, uint32_t smem_address, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(smem_address),
                 "r"(bytes)
                 : "memory");
}

// Stores and additions of this thread since the last call become a group.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most `kPending` of this thread's groups have still to read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until they have been written, and this thread sees it.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace libflash::cuda
