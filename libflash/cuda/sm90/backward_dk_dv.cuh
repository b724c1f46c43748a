// The consumer warpgroups of the sm_90a backward kernel: each has 64 keys and keeps their dK and dV in registers. Scores are
// transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T, rounded in registers, are the left operands of dV += P^T dO
// and dK += dS^T Q. Only dS goes through shared memory, to the warpgroup that computes dQ.
#pragma once

#include "cuda/sm90/backward_consumer_state.cuh"
#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/backward_products.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"
#include "cuda/sm90/backward_scores.cuh"
#include "cuda/sm90/backward_work_tiles.cuh"
#include "cuda/sm90/backward_zero_fill.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardConsumer {
    using T = typename Traits::T;
    using KvTile = typename Traits::KvTile;
    using QTile = typename Traits::QTile;
    using Products = BackwardProducts<Traits>;
    using Tiles = BackwardSharedTiles<Traits>;
    static constexpr int kHeadDim = Traits::kHeadDim, kBlockM = Traits::kBlockM;

    BackwardContext<Traits>& context;
    const BackwardWorkTiles<Traits> work_tiles{context};
    const BackwardQueryTiles<Traits> query_tiles{context};
    const BackwardScores<Traits> scores{context};
    const BackwardZeroFill<Traits> zero_fill{context};
    const BackwardEpilogue<Traits> epilogue{context};

    using Position = typename BackwardQueryTiles<Traits>::Position;
    using Scores = typename BackwardScores<Traits>::Scores;
    using Fragments = typename BackwardScores<Traits>::Fragments;
    using Operand = uint32_t[kHeadDim / 16][4];

    // State of a consumer warp.
    struct State {
        typename Products::Addresses addresses;
        int first_key, lane;  // first key of the warp, in the tile
        PipelineState<Traits::kStages> queries;
        PipelineState<Traits::kScoreStages> gradients;
        Operand k;   // this warp's rows of K; there are no registers for V
        uint32_t v;  // shared address
        Scores p;    // scores, then probabilities
        Scores ds;   // dP, then dS
        typename Products::Sums dk, dv;
    };

    __device__ __forceinline__ void run() const {
        auto& storage = context.storage;
        const int warp = consumer_warp<Traits>(), lane = static_cast<int>(threadIdx.x & 31);
        State c{Products::addresses(context, warp, lane), warp * 16, lane, PipelineState<Traits::kStages>(storage.queries),
                PipelineState<Traits::kScoreStages>(storage.gradients)};
#pragma unroll 1
        while (work_tiles.wait()) {
            clear(c);
            receive_keys(c);
            const auto at = query_tiles.first();
            if (at.left > 0) loop_over_queries(c, at);
            named_barrier_wait(1 + warp / 4, 128);  // the epilogue overwrites the group's rows of V: wait for their readers
            const auto rows = epilogue.rows_through_v(c.first_key);
            epilogue.store_dv(rows, lane, c.dv, undo_exponent_shift<T>());
            epilogue.store_dk(rows, lane, c.dk, undo_exponent_shift<T>() * context.params.softmax_scale);
            epilogue.wait(lane);
            work_tiles.release_v(lane);
            work_tiles.release();
        }
    }

private:
    __device__ __forceinline__ static void clear(State& c) {
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) c.dk[i] = c.dv[i] = 0.0f;
    }
    // Waits for K and V of the work tile and loads K into registers.
    __device__ __forceinline__ void receive_keys(State& c) const {
        work_tiles.wait_for_k();
        zero_fill.keys(context.k(), c.addresses.first_row, Traits::kGroupKeys);
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            KvTile::load_fragment(context.k(), c.first_key, step * 2, c.lane, c.k[step]);
        work_tiles.release_k(c.lane);
        work_tiles.wait_for_v();
        zero_fill.keys(context.v(), c.addresses.first_row, Traits::kGroupKeys);
        c.v = uniform(context.v());
    }

    // S and dP of a tile are issued as soon as their registers are free: before dV and dK of the previous tile, which then
    // overlap the exponentials.
    __device__ __forceinline__ void loop_over_queries(State& c, Position at) const {
        Fragments p, ds;  // P and dS, rounded
        bool edge = query_tiles.is_edge(at.tile);
        c.queries.wait_full();
        zero_fill.queries(c.queries.stage, at.tile);
        issue_scores(c);
        int stage = c.queries.stage;
        finish_scores<true>(c, at, edge, p, ds);
#pragma unroll 1
        while (at.left > 0) {
            const bool stage_is_empty = c.gradients.is_empty();
            issue_scores(c);
            issue_products(c, stage, p, ds);
            store_ds(c, ds, stage_is_empty);
            const int previous = stage;
            stage = c.queries.stage;
            finish_scores<false>(c, at, edge, p, ds);
            if (arrives_for_warp(c.lane)) c.queries.empty_of(previous).arrive();
        }
        issue_products(c, stage, p, ds);
        store_ds(c, ds, false);
        Products::publish_ds(c.gradients, c.lane);
        wgmma_wait<0>();
        wgmma_fence_operand(c.dk);
        wgmma_fence_operand(c.dv);
        if (arrives_for_warp(c.lane)) c.queries.empty_of(stage).arrive();
    }
    __device__ __forceinline__ void issue_products(State& c, int stage, const Fragments& p, const Fragments& ds) const {
        const uint32_t q = uniform(Tiles::q(c.addresses.tiles, stage));
        wgmma_fence();
        Products::add(c.dv, p, Tiles::dout_of(q));
        Products::add(c.dk, ds, q);
        wgmma_commit();
    }

    // Computes P and dS, rounded, from S and dP. After the first tile, dV and dK of the previous tile were issued after S and dP,
    // hence the wait counts, and dS of the previous tile, which was stored earlier, is published here. Then advances to the next
    // tile and waits for it. The code between the wgmma waits contains a branch: otherwise the compiler would move it past the
    // last wait.
    template <bool kFirst>
    __device__ __forceinline__ void finish_scores(State& c, Position& at, bool& edge, Fragments& p, Fragments& ds) const {
        const SoftmaxStatistics* of_lane = scores.statistics_of_lane(c.queries.stage, c.lane);
        typename BackwardScores<Traits>::Numbers numbers;  // loaded before the wait
        scores.load_lse(numbers, of_lane);
        wgmma_wait<kFirst ? 1 : 2>();
        wgmma_fence_operand(c.p);
        scores.exponentiate(c.p, numbers);
        if (edge) scores.mask_edge(c.p, c.first_key, c.lane, at.tile);
        if (!kFirst) Products::publish_ds(c.gradients, c.lane);
        c.queries.advance();
        const bool is_full = c.queries.is_full();
        scores.load_delta(numbers, of_lane);
        wgmma_wait<kFirst ? 0 : 1>();
        wgmma_fence_operand(c.ds);
        scores.differentiate(c.ds, c.p, numbers);
        query_tiles.advance(at);
        edge = query_tiles.is_edge(at.tile);
        if (at.left > 0 && !is_full) c.queries.wait_full();
        if (Traits::kRagged && at.left > 0) zero_fill.queries(c.queries.stage, at.tile);
        wgmma_wait<0>();
        wgmma_fence_operand(c.dk);
        wgmma_fence_operand(c.dv);
        scores.round(p, c.p);
        scores.round(ds, c.ds);
    }

    // Issues S^T = K Q^T and dP^T = V dO^T, one wgmma group each.
    __device__ __forceinline__ void issue_scores(State& c) const {
        const uint32_t q = uniform(Tiles::q(c.addresses.tiles, c.queries.stage));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            Wgmma<T, kBlockM>::template multiply<false>(c.p, c.k[step], QTile::k_major_operand(q, step), step > 0);
        wgmma_commit();
        Products::template issue_scores<kBlockM>(c.ds, c.v, c.addresses.first_row, Tiles::dout_of(q));
    }
    // `stage_is_empty`: the warp has already seen that the stage is empty.
    __device__ __forceinline__ void store_ds(const State& c, const Fragments& ds, bool stage_is_empty) const {
        if (!stage_is_empty) c.gradients.wait_empty();
        Products::store_ds(c.addresses, c.gradients.stage, ds);
    }
};

}  // namespace libflash::cuda::sm90
