// How a consumer warp releases stages of a pipeline.
#pragma once

#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

template <int kStages>
__device__ __forceinline__ void release_stage(PipelineState<kStages>& state, int lane) {
    if (arrives_for_warp(lane)) state.empty().arrive();
    state.advance();
}

// For a warpgroup without rows: only releases the tiles of K and V that the producer loads. All lanes must have seen a phase
// before it can end: a lane that fell behind would mistake a later phase for it.
template <int kStages>
__device__ __forceinline__ void skip_tiles(PipelineState<kStages> k, PipelineState<kStages> v, int tiles, int lane) {
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        k.wait_full();
        __syncwarp();
        release_stage(k, lane);
        v.wait_full();
        __syncwarp();
        release_stage(v, lane);
    }
}

}  // namespace libflash::cuda::sm90
