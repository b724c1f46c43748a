// A named barrier before which some warpgroups write to shared memory what others read after it. racecheck does not know the
// order that a named barrier of a part of a thread block gives, so in a build for it an mbarrier takes its place.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

struct ExchangeBarrier {
    int number, threads;  // of the named barrier: the threads that arrive, and those that only wait
    MBarrier substitute;  // of the threads that arrive

    // Those that write and do not wait.
    __device__ __forceinline__ void arrive() const {
        if constexpr (kAllLanesArrive) {
            substitute.arrive();
        } else {
            named_barrier_arrive(number, threads);
        }
    }
    // Those that only read. `turn`: how often the barrier was used before; its parity counts.
    __device__ __forceinline__ void wait(int turn) const {
        if constexpr (kAllLanesArrive) {
            substitute.wait(static_cast<uint32_t>(turn) & 1);
        } else {
            named_barrier_wait(number, threads);
        }
    }
    // Those that do both.
    __device__ __forceinline__ void arrive_and_wait(int turn) const {
        if constexpr (kAllLanesArrive) substitute.arrive();
        wait(turn);
    }
};

}  // namespace libflash::cuda::sm90
