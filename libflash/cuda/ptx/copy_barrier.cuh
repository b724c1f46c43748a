// An mbarrier that waits for cp.async (sm_80).
#pragma once

#include "cuda/ptx/barrier.cuh"

namespace libflash::cuda {

// An arrival at `barrier` that follows when all cp.async that this thread has issued are complete. It does not order other
// writes. Before wgmma reads the data, the threads that wait call fence_shared_for_async().
__device__ __forceinline__ void arrive_after_copies(const MBarrier& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier.address) : "memory");
}

}  // namespace libflash::cuda
