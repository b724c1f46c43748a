// A request of the producer warp to the zero-fill warp (forward_zero_fill.cuh), in shared memory.
#pragma once

#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

struct ZeroFillRequest {
    PipelineBarriers<1> barriers;
    uint32_t phase;    // of the producer warp
    int stage, count;  // the stage of V, and how many of its rows belong to the sequence; count -1: there are no more requests

    __device__ __forceinline__ void init() {
        barriers.init(1);
        phase = 0;
    }
    // The barrier on which a load of V for this warp completes.
    __device__ __forceinline__ MBarrier loaded() const { return {shared_address(barriers.full)}; }
    // Called by the producer thread. Returns the barrier on which the load of V must complete.
    __device__ __forceinline__ MBarrier send(int stage_of_v, int row_count) {
        MBarrier{shared_address(barriers.empty)}.wait(phase ^ 1);
        phase ^= 1;
        stage = stage_of_v, count = row_count;
        return loaded();
    }
};

}  // namespace libflash::cuda::sm90
