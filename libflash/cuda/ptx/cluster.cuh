// Clusters of sm_90: thread blocks that run at the same time and can access each other's shared memory. The launch sets their
// size.
//
// Thread blocks write to each other's shared memory and arrive at each other's mbarriers. This may begin only after all of them
// have passed the cluster barrier (each having called fence_barrier_init() before), and no thread block may exit before the
// last such access, which takes a second cluster barrier.
#pragma once

#include "cuda/ptx/barrier.cuh"

namespace libflash::cuda {

// The rank of this thread block in its cluster, and the size of the cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {
    uint32_t size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// The barrier of all threads of the cluster, in whole warps: writes before the arrival are visible after the wait. Each thread
// alternates arrivals and waits.
__device__ __forceinline__ void cluster_barrier_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The shared::cluster address, in thread block `rank`, of what is at `smem_address` in this thread block.
__device__ __forceinline__ uint32_t address_in_cluster(uint32_t smem_address, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address), "r"(rank));
    return address;
}

// One arrival at the mbarrier at the same address of thread block `rank`, which may be this one. Only that thread block can
// wait for it. The arrival signals that this thread has finished its reads. It does not publish this thread's writes: that
// takes a release at cluster scope, which waits for all its writes.
__device__ __forceinline__ void arrive_in_cluster(const MBarrier& barrier, uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_cluster(barrier.address, rank)) : "memory");
}

}  // namespace libflash::cuda
