// The consumer warpgroup of backward_divided.cuh that computes dS and dK.
#pragma once

#include "cuda/sm90/backward_divided_options.cuh"
#include "cuda/sm90/backward_divided_state.cuh"
#include "cuda/sm90/backward_epilogue.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardKeysWarpgroup {
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
    const BackwardDividedOptions<Traits> options{context};
    const BackwardZeroFill<Traits> zero_fill{context};
    const BackwardEpilogue<Traits> epilogue{context};

    // `warp`: the number of the warp in the warpgroup.
    __device__ __forceinline__ void run(int warp, int lane) const {
        State c(context, warp, lane);
#pragma unroll 1
        while (work_tiles.wait()) {
            c.clear();
            work_tiles.wait_for_v();
            zero_fill.keys(context.v(), 0, Traits::kBlockN);
            const auto at = query_tiles.first();
            if (at.left > 0) loop_over_queries(c, at);
            work_tiles.release_v(lane);
            c.store_through_free_stage(epilogue, [&](uint32_t stage) {  // through dO's part; dV has Q's
                epilogue.store_dk({context.tile(), c.first_key_again(), static_cast<int>(Tiles::dout_of(stage))}, lane, c.sums,
                                  undo_exponent_shift<T>() * context.params.softmax_scale);
            });
            work_tiles.release();
        }
    }

private:
    // dK of a tile and dP of the next tile are issued together, as dV and S in backward_values.cuh.
    __device__ __forceinline__ void loop_over_queries(State& c, Position at) const {
        Scores x;      // dP, dS
        Fragments ds;  // rounded
        c.wait_for_queries(zero_fill, at);
        issue_dp(c, x);
        wgmma_wait<0>();
        wgmma_fence_operand(x);
        int stage;
#pragma unroll 1
        while (true) {
            context.storage.probabilities(c.gradients.stage).wait(c.gradients.phase);
            differentiate(c, x);
            scores.round(ds, x);
            Products::store_ds(c.addresses, c.gradients.stage, ds);
            stage = c.queries.stage;
            add_queries(c, ds);
            Products::publish_ds(c.gradients, c.lane);
            c.queries.advance();
            query_tiles.advance(at);
            if (at.left <= 0) break;
            c.wait_for_queries(zero_fill, at);
            issue_dp(c, x);
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
    __device__ __forceinline__ void issue_dp(const State& c, Scores& dp) const {
        Products::template issue_scores<Traits::kBlockM>(dp, uniform(Tiles::v_of(c.addresses.tiles)), 0, Tiles::dout_of(c.q()));
    }
    // dK += dS^T Q.
    __device__ __forceinline__ void add_queries(State& c, const Fragments& ds) const {
        wgmma_fence();
        Products::add(c.sums, ds, c.q());
        wgmma_commit();
    }
    // dS from dP, and from P, or the weights of rare options, that the other consumer warpgroup stored.
    __device__ __forceinline__ void differentiate(const State& c, Scores& x) const {
        const uint32_t statistics = c.statistics();
#pragma unroll
        for (int step = 0; step < Traits::kBlockM / 16; ++step) {
            uint32_t p[4];
            Products::load_p(c.addresses, c.gradients.stage, step, p);
            if constexpr (Traits::kRareOptions) {
                options.differentiate_kept(x, p, step, statistics);
            } else {
                scores.differentiate_step(x, p, step, statistics);
            }
        }
    }
};

}  // namespace libflash::cuda::sm90
