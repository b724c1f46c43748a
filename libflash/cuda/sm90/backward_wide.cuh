// The consumer warpgroups of the sm_90a backward kernel for head_dim above 64: those of backward_dk_dv.cuh with S and dP in the same registers,
// because dK and dV take so many. P is rounded before dP is computed, and dS takes it from the rounded values.
#pragma once

#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/backward_products.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"
#include "cuda/sm90/backward_scores.cuh"
#include "cuda/sm90/backward_zero_fill.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardWideConsumer {
    using T = typename Traits::T;
    using Products = BackwardProducts<Traits>;
    using Tiles = BackwardSharedTiles<Traits>;
    using Position = typename BackwardQueryTiles<Traits>::Position;
    using Scores = typename BackwardScores<Traits>::Scores;
    using Fragments = typename BackwardScores<Traits>::Fragments;

    const BackwardContext<Traits>& context;
    const BackwardQueryTiles<Traits> query_tiles{context};
    const BackwardScores<Traits> scores{context};
    const BackwardZeroFill<Traits> zero_fill{context};
    const BackwardEpilogue<Traits> epilogue{context};

    // State of a consumer warp.
    struct State {
        typename Products::Addresses addresses;
        int first_key, lane;  // first key of the warp, in the tile
        PipelineState<Traits::kStages> queries;
        PipelineState<Traits::kScoreStages> gradients;
        typename Products::Sums dk, dv;
    };

    __device__ __forceinline__ void run() const {
        auto& storage = context.storage;
        const int warp = static_cast<int>(uniform(threadIdx.x / 32)) - 8, lane = static_cast<int>(threadIdx.x & 31);
        State c{Products::addresses(context, warp, lane), warp * 16, lane, PipelineState<Traits::kStages>(storage.queries),
                PipelineState<Traits::kScoreStages>(storage.gradients)};
#pragma unroll
        for (int i = 0; i < Traits::kHeadDim / 2; ++i) c.dk[i] = c.dv[i] = 0.0f;
        const auto at = query_tiles.first();
        storage.keys().wait(0);
        zero_fill.keys();
        if (at.left > 0) loop_over_queries(c, at);
        named_barrier_wait(1 + warp / 4, 128);  // no warp reads the group's rows of V any more; the epilogue overwrites them
        epilogue.store_dv(c.first_key, c.lane, c.dv, undo_exponent_shift<T>());
        epilogue.store_dk(c.first_key, c.lane, c.dk, undo_exponent_shift<T>() * context.params.softmax_scale);
        if (c.lane == 0) tma_store_wait_read<0>();
    }

private:
    // dK of a tile and S of the next one are issued together and overlap the exponentials. The loop ends in the middle, so that no
    // wgmma is in flight where it starts again: the compiler would serialise them.
    __device__ __forceinline__ void loop_over_queries(State& c, Position at) const {
        Scores x;     // S, P, dP, dS
        Fragments f;  // P or dS, rounded
        c.queries.wait_full();
        zero_fill.queries(c.queries.stage, at.tile);
        int stage = c.queries.stage;
        issue_s(c, x);
        wgmma_wait<0>();
        wgmma_fence_operand(x);
        exponentiate(c, x, at.tile);
#pragma unroll 1
        while (true) {
            const uint32_t q = uniform(Tiles::q(c.addresses.k, stage));
            scores.round(f, x);
            add_values(c, x, f, q);
            const bool stage_is_empty = c.gradients.is_empty();
            wgmma_wait<0>();
            wgmma_fence_operand(c.dv);
            wgmma_fence_operand(x);
            scores.differentiate(x, f, statistics(c));
            c.queries.advance();
            const bool is_full = c.queries.is_full();
            query_tiles.advance(at);
            if (at.left > 0 && !is_full) c.queries.wait_full();
            if (Traits::kRagged && at.left > 0) zero_fill.queries(c.queries.stage, at.tile);
            wgmma_fence_operand(x);  // keeps the rounding from using more registers earlier
            scores.round(f, x);
            if (!stage_is_empty) c.gradients.wait_empty();
            Products::store_ds(c.addresses, c.gradients.stage, f);
            if (at.left <= 0) break;
            issue_s(c, x);
            add_queries(c, f, q);
            Products::publish_ds(c.gradients, c.lane);
            wgmma_wait<1>();
            wgmma_fence_operand(x);
            exponentiate(c, x, at.tile);
            wgmma_wait<0>();
            wgmma_fence_operand(c.dk);
            wgmma_fence_operand(x);
            if (c.lane == 0) c.queries.empty_of(stage).arrive();
            stage = c.queries.stage;
        }
        Products::publish_ds(c.gradients, c.lane);
        add_queries(c, f, uniform(Tiles::q(c.addresses.k, stage)));
        wgmma_wait<0>();
        wgmma_fence_operand(c.dk);
    }

    // S of the current stage.
    __device__ __forceinline__ void issue_s(const State& c, Scores& s) const {
        const uint32_t q = uniform(Tiles::q(c.addresses.k, c.queries.stage));
        Products::template issue_scores<Traits::kBlockM>(s, c.addresses.k, c.addresses.first_row, q);
    }
    // dP, and dV += P^T dO.
    __device__ __forceinline__ void add_values(State& c, Scores& dp, const Fragments& p, uint32_t q) const {
        const uint32_t dout = Tiles::dout_of(q);
        Products::template issue_scores<Traits::kBlockM>(dp, Tiles::v(c.addresses.k), c.addresses.first_row, dout);
        wgmma_fence();
        Products::add(c.dv, p, dout);
        wgmma_commit();
    }
    // dK += dS^T Q.
    __device__ __forceinline__ void add_queries(State& c, const Fragments& ds, uint32_t q) const {
        wgmma_fence();
        Products::add(c.dk, ds, q);
        wgmma_commit();
    }

    // The shared address of the statistics of the lane's first query.
    __device__ __forceinline__ uint32_t statistics(const State& c) const {
        return scores.statistics_of_lane(c.addresses.k, c.queries.stage, c.lane);
    }
    __device__ __forceinline__ void exponentiate(const State& c, Scores& s, int tile) const {
        scores.exponentiate(s, statistics(c));
        if (query_tiles.is_edge(tile)) scores.mask_edge(s, c.first_key, c.lane, tile);
    }
};

}  // namespace libflash::cuda::sm90
