// Iterates over the work tiles of a thread block of the sm_90a backward kernel, for its consumers and its dQ warpgroup. The
// producer finds the work tiles (backward_producer.cuh) and loads their K and V.
#pragma once

#include "cuda/sm90/backward_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardWorkTiles {
    BackwardContext<Traits>& context;

    // Waits for the next context.tile(). Returns false if there is none.
    __device__ __forceinline__ bool wait() const {
        context.storage.tile_full(context.slot()).wait(context.phase());
        return context.tile().exists();
    }
    // Called by all threads that have called wait(), when they are done with the work tile.
    __device__ __forceinline__ void release() const {
        context.storage.tile_empty(context.slot()).arrive();
        ++context.passed;
    }

    __device__ __forceinline__ void wait_for_k() const { context.storage.k_full(context.key_stage()).wait(context.key_phase()); }
    __device__ __forceinline__ void wait_for_v() const { context.storage.v_full(context.key_stage()).wait(context.key_phase()); }
    // Each warp that reads K (or V) calls it after it has last read or overwritten K (or V). All lanes must have seen that the
    // stage was full, or they could miss the phase.
    __device__ __forceinline__ void release_k(int lane) const {
        __syncwarp();
        if (lane == 0) context.storage.k_empty(context.key_stage()).arrive();
    }
    __device__ __forceinline__ void release_v(int lane) const {
        __syncwarp();
        if (lane == 0) context.storage.v_empty(context.key_stage()).arrive();
    }
};

}  // namespace libflash::cuda::sm90
