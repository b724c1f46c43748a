// The state that both consumer warpgroups of backward_divided.cuh have.
#pragma once

#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/sm90/backward_consumer_state.cuh"
#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"
#include "cuda/sm90/backward_scores.cuh"
#include "cuda/sm90/backward_work_tiles.cuh"
#include "cuda/sm90/backward_zero_fill.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

// State of a consumer warp. The stages of its pipeline `gradients` hold P, then dS.
template <class Traits>
struct BackwardDividedState : BackwardConsumerState<Traits> {
    using Tiles = BackwardSharedTiles<Traits>;
    using Position = typename BackwardQueryTiles<Traits>::Position;
    using Base = BackwardConsumerState<Traits>;
    using Base::addresses, Base::lane, Base::queries;

    typename BackwardProducts<Traits>::Sums sums;  // dV or dK
    static_assert(Traits::QTile::kBytes >= Traits::KvTile::kBytes, "dV fits the part of Q of a stage, dK the part of dO");

    __device__ __forceinline__ BackwardDividedState(const BackwardContext<Traits>& context, int warp, int warp_lane)
        : Base(context, warp, warp_lane) {}
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < Traits::kHeadDim / 2; ++i) sums[i] = 0.0f;
    }
    // The shared address of Q of the current stage.
    __device__ __forceinline__ uint32_t q() const { return uniform(Tiles::q(addresses.tiles, queries.stage)); }
    // Waits for Q and dO of a tile.
    __device__ __forceinline__ void wait_for_queries(const BackwardZeroFill<Traits>& zero_fill, const Position& at) const {
        queries.wait_full();
        zero_fill.queries(queries.stage, at.tile);
    }
    // Recomputes first_key, so that it needs no register in the loop.
    __device__ __forceinline__ int first_key_again() const {
        return hide_from_compiler(static_cast<int>(threadIdx.x)) >> 1 & 0x30;  // warp % 4 * 16
    }
    __device__ __forceinline__ void release_queries(int stage) const {
        if (arrives_for_warp(lane)) queries.empty_of(stage).arrive();
    }
    // Writes a gradient through the stage of Q and dO that the producer leaves free. Calls store(offset of the stage's Q from the
    // tiles).
    template <class Store>
    __device__ __forceinline__ void store_through_free_stage(const BackwardEpilogue<Traits>& epilogue, const Store& store) {
        queries.wait_full();
        store(Tiles::q(0, queries.stage));
        epilogue.wait(lane);
        release_queries(queries.stage);
        queries.advance();
    }
    __device__ __forceinline__ uint32_t statistics() const {
        return BackwardScores<Traits>::statistics_of_lane(addresses.tiles, queries.stage, lane);
    }
};

}  // namespace libflash::cuda::sm90
