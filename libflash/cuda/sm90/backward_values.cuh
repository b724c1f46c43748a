// The consumer warpgroup of backward_divided.cuh that computes P and dV.
#pragma once

#include "cuda/sm90/backward_divided_state.cuh"
#include "cuda/sm90/backward_epilogue.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardValuesWarpgroup {
    using T = typename Traits::T;
    using Products = BackwardProducts<Traits>;
    using Tiles = BackwardSharedTiles<Traits>;
    using State = BackwardDividedState<Traits>;
    using Position = typename State::Position;
    using Scores = typename BackwardScores<Traits>::Scores;
    using Fragments = typename BackwardScores<Traits>::Fragments;

    BackwardContext<Traits>& context;
    const BackwardWorkTiles<Traits> work_tiles{context};
    const BackwardQueryTiles<Traits> query_tiles{context};
    const BackwardScores<Traits> scores{context};
    const BackwardZeroFill<Traits> zero_fill{context};
    const BackwardEpilogue<Traits> epilogue{context};

    // `warp`: the number of the warp in the warpgroup.
    __device__ __forceinline__ void run(int warp, int lane) const {
        State c(context, warp, lane);
#pragma unroll 1
        while (work_tiles.wait()) {
            c.clear();
            work_tiles.wait_for_k();
            zero_fill.keys(context.k(), 0, Traits::kBlockN);
            const auto at = query_tiles.first();
            if (at.left > 0) loop_over_queries(c, at);
            work_tiles.release_k(lane);
            c.store_through_free_stage(epilogue, [&](uint32_t stage) {  // through Q's part
                epilogue.store_dv({context.tile(), c.first_key_again(), static_cast<int>(stage)}, lane, c.sums,
                                  undo_exponent_shift<T>() * Traits::kUndoProbabilityShift);
            });
            work_tiles.release();
        }
    }

private:
    // dV of a tile and S of the next tile are issued together. The loop body begins after both are complete: no product is in
    // flight at the back edge, because the compiler would serialise the products. dV is issued first because Q of the next tile
    // may not have arrived.
    __device__ __forceinline__ void loop_over_queries(State& c, Position at) const {
        Scores x;     // S, P
        Fragments p;  // P, rounded
        c.wait_for_queries(zero_fill, at);
        issue_s(c, x);
        wgmma_wait<0>();
        wgmma_fence_operand(x);
        int stage;
#pragma unroll 1
        while (true) {
            const bool stage_is_empty = c.gradients.is_empty();
            exponentiate(c, x, at.tile);
            scores.round(p, x);
            if (!stage_is_empty) c.gradients.wait_empty();
            hand_over(c, p);
            stage = c.queries.stage;
            add_values(c, p);
            c.queries.advance();
            query_tiles.advance(at);
            if (at.left <= 0) break;
            c.wait_for_queries(zero_fill, at);
            issue_s(c, x);
            wgmma_wait<1>();
            wgmma_fence_operand(c.sums);
            c.release_queries(stage);
            wgmma_wait<0>();
            wgmma_fence_operand(x);
        }
        wgmma_wait<0>();
        wgmma_fence_operand(c.sums);
        c.release_queries(stage);
    }
    __device__ __forceinline__ void issue_s(const State& c, Scores& s) const {
        Products::template issue_scores<Traits::kBlockM>(s, uniform(c.addresses.tiles), 0, c.q());
    }
    // dV += P^T dO.
    __device__ __forceinline__ void add_values(State& c, const Fragments& p) const {
        wgmma_fence();
        Products::add(c.sums, p, Tiles::dout_of(c.q()));
        wgmma_commit();
    }
    __device__ __forceinline__ void exponentiate(const State& c, Scores& s, int tile) const {
        scores.exponentiate(s, c.statistics());
        if (query_tiles.is_edge(tile)) scores.mask_edge(s, c.first_key, c.lane, tile);
    }
    // Stores P for the other consumer warpgroup.
    __device__ __forceinline__ void hand_over(State& c, const Fragments& p) const {
        Products::store_ds(c.addresses, c.gradients.stage, p);
        __syncwarp();
        if (c.lane == 0) context.storage.probabilities(c.gradients.stage).arrive();
        c.gradients.advance();
    }
};

}  // namespace libflash::cuda::sm90
