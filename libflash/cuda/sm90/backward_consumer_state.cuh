// The state that every consumer warp of the sm_90a backward kernel has.
#pragma once

#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/sm90/backward_products.cuh"

namespace libflash::cuda::sm90 {

// The number of a warp among the consumers, in a uniform register.
template <class Traits>
__device__ __forceinline__ int consumer_warp() {
    return static_cast<int>(uniform(threadIdx.x / 32)) - (Traits::kThreads / 32 - Traits::kConsumerWarps);
}

// Recomputes consumer_warp(), because the compiler does not keep it in a uniform register across the epilogue of a work tile.
template <class Traits>
__device__ __forceinline__ int consumer_warp_again() {
    return static_cast<int>(uniform(static_cast<uint32_t>(hide_from_compiler(static_cast<int>(threadIdx.x))) / 32)) -
           (Traits::kThreads / 32 - Traits::kConsumerWarps);
}

template <class Traits>
struct BackwardConsumerState {
    using Products = BackwardProducts<Traits>;

    typename Products::Addresses addresses;
    int first_key, lane;  // first key of the warp, in the tile
    PipelineState<Traits::kStages> queries;
    PipelineState<Traits::kScoreStages> gradients;

    // `warp`: its 16 keys begin at 16 * warp.
    __device__ __forceinline__ BackwardConsumerState(const BackwardContext<Traits>& context, int warp, int warp_lane)
        : addresses(Products::addresses(context, warp, warp_lane)), first_key(warp * 16), lane(warp_lane),
          queries(context.storage.queries), gradients(context.storage.gradients) {}
};

// BackwardConsumerState with dK and dV of 64 keys.
template <class Traits>
struct BackwardSumsState : BackwardConsumerState<Traits> {
    typename BackwardProducts<Traits>::Sums dk, dv;

    __device__ __forceinline__ BackwardSumsState(const BackwardContext<Traits>& context, int warp, int warp_lane)
        : BackwardConsumerState<Traits>(context, warp, warp_lane) {}
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < Traits::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.0f;
    }
};

}  // namespace libflash::cuda::sm90
