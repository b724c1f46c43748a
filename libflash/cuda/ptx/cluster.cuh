// Clusters of sm_90: thread blocks that run at the same time and reach each other's shared memory. How many there are in one the launch says.
//
// Others write to a thread block's shared memory and arrive at its mbarriers: it may be reached once all of its cluster have been at the cluster's barrier
// (its own fence_barrier_init() before that), and it does not end before the last of that is done, which takes the barrier again.
#pragma once

#include "cuda/ptx/barrier.cuh"

namespace libflash::cuda {

// This thread block's number in its cluster, and how many it has.
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

// The barrier of all threads of the cluster, whole warps: what was written before the arrival is seen after the wait. Arrivals and waits of a thread alternate.
__device__ __forceinline__ void cluster_barrier_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// What lies at `smem_address` in this thread block, in thread block `rank`: an address for instructions on shared::cluster.
__device__ __forceinline__ uint32_t address_in_cluster(uint32_t smem_address, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address), "r"(rank));
    return address;
}

// One arrival at that mbarrier of thread block `rank`, which may be this one; only there it can be waited for. It says that this thread has read what it
// wanted to. It does not make what it has written seen there: that takes a release to the cluster, which waits for all of the thread's writes to memory.
__device__ __forceinline__ void arrive_in_cluster(const MBarrier& barrier, uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_cluster(barrier.address, rank)) : "memory");
}

}  // namespace libflash::cuda
