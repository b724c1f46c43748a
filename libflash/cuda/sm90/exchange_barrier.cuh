// A named barrier: warpgroups write to shared memory before it, others read after it. racecheck does not understand named
// barriers of a part of a thread block, so in a build for racecheck an mbarrier replaces the named barrier.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

struct ExchangeBarrier {
    int number, threads;  // of the named barrier; `threads` counts those that arrive and those that only wait
    MBarrier substitute;  // of the threads that arrive

    // For threads that write and do not wait.
    __device__ __forceinline__ void arrive() const {
        if constexpr (kAllLanesArrive) {
            substitute.arrive();
        } else {
            named_barrier_arrive(number, threads);
        }
    }
    // For threads that only read. `turn`: how often the barrier was used before; only its parity matters.
    __device__ __forceinline__ void wait(int turn) const {
        if constexpr (kAllLanesArrive) {
            substitute.wait(static_cast<uint32_t>(turn) & 1);
        } else {
            named_barrier_wait(number, threads);
        }
    }
    // For threads that write and read.
    __device__ __forceinline__ void arrive_and_wait(int turn) const {
        if constexpr (kAllLanesArrive) substitute.arrive();
        wait(turn);
    }
};

}  // namespace libflash::cuda::sm90
