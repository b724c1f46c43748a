// The consumer warpgroups of the sm_90a backward kernel for head_dim above 64: as in backward_dk_dv.cuh, but dK and dV leave
// fewer registers for scores: dP and dS are computed for half of the queries at a time.
#pragma once

#include "cuda/sm90/backward_consumer_state.cuh"
#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"
#include "cuda/sm90/backward_scores.cuh"
#include "cuda/sm90/backward_work_tiles.cuh"
#include "cuda/sm90/backward_zero_fill.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardHalvesConsumer {
    using T = typename Traits::T;
    using Products = BackwardProducts<Traits>;
    using Tiles = BackwardSharedTiles<Traits>;
    using State = BackwardSumsState<Traits>;
    using Position = typename BackwardQueryTiles<Traits>::Position;
    using Scores = typename BackwardScores<Traits>::Scores;
    static constexpr int kHalf = Traits::kBlockM / 2;
    // These instances compute addresses differently: which computation spills depends on the registers that the instance has
    // left.
    static constexpr bool kPlain = !Traits::kRagged && !Traits::kFixedOrder && Traits::config.dtype == KernelType::bf16_;
    using Half = uint32_t[kHalf / 16][4];  // rounded scores of half of the queries

    BackwardContext<Traits>& context;
    const BackwardWorkTiles<Traits> work_tiles{context};
    const BackwardQueryTiles<Traits> query_tiles{context};
    const BackwardScores<Traits> scores{context};
    const BackwardZeroFill<Traits> zero_fill{context};
    const BackwardEpilogue<Traits> epilogue{context};

    __device__ __forceinline__ void run() const {
        const int warp = consumer_warp<Traits>();
        State c(context, warp, static_cast<int>(threadIdx.x & 31));
#pragma unroll 1
        while (work_tiles.wait()) {
            c.clear();
            if constexpr (kPlain) c.addresses.first_row = consumer_warp_again<Traits>() / 4 * Traits::kGroupKeys;
            const auto at = query_tiles.first();
            work_tiles.wait_for_k();
            zero_fill.keys(context.k(), c.addresses.first_row, Traits::kGroupKeys);
            if (Traits::kRagged || at.left <= 0) {
                work_tiles.wait_for_v();
                zero_fill.keys(context.v(), c.addresses.first_row, Traits::kGroupKeys);
            }
            if (at.left > 0) loop_over_queries(c, at);
            work_tiles.release_k(c.lane);
            work_tiles.release_v(c.lane);
            c.gradients.wait_all_empty();
            const auto rows = epilogue.rows_through_scores(kPlain ? consumer_warp_again<Traits>() * 16 : c.first_key);
            epilogue.store_dv(rows, c.lane, c.dv, undo_exponent_shift<T>());
            epilogue.store_dk(rows, c.lane, c.dk, undo_exponent_shift<T>() * context.params.softmax_scale);
            work_tiles.release();
        }
        epilogue.wait(c.lane);
    }

private:
    // There are registers for dP of only half of the queries. dK of a tile and S of the next tile are issued together and overlap
    // the exponentials. The loop exits in the middle of its body, so that no wgmma is in flight at the back edge: the compiler
    // would serialise the products otherwise.
    __device__ __forceinline__ void loop_over_queries(State& c, Position at) const {
        Scores p;  // S, then P
        c.queries.wait_full();
        zero_fill.queries(c.queries.stage, at.tile);
        int stage = c.queries.stage;
        issue_s(c, p);
        epilogue.wait(c.lane);  // of the previous work tile, whose gradients are written through the stages of dS
        wgmma_wait<0>();
        wgmma_fence_operand(p);
        exponentiate(c, p, at.tile);
        if (!Traits::kRagged) work_tiles.wait_for_v();
        Half first, second;  // dS, rounded
#pragma unroll 1
        while (true) {
            const uint32_t q = uniform(Tiles::q(c.addresses.tiles, stage)), dout = Tiles::dout_of(q);
            Half p_first, p_second;  // P, rounded
            {
                float dp[kHalf / 2];
                issue_dp(c, dp, dout, 0);
                wgmma_wait<0>();
                wgmma_fence_operand(dp);
                scores.differentiate(dp, p, statistics(c, 0));
                scores.round(p_first, p);
                scores.round(first, dp);
            }
            {
                float dp[kHalf / 2];
                issue_dp(c, dp, dout, kHalf);
                add(c.dv, p_first, dout, 0);
                wgmma_wait<1>();
                wgmma_fence_operand(dp);
                scores.differentiate(dp, p + kHalf / 2, statistics(c, kHalf));
                scores.round(p_second, p + kHalf / 2);
                scores.round(second, dp);
            }
            c.gradients.wait_empty();
            Products::store_ds(c.addresses, c.gradients.stage, first, 0);
            Products::store_ds(c.addresses, c.gradients.stage, second, kHalf);
            add(c.dv, p_second, dout, kHalf);
            c.queries.advance();
            Products::publish_ds(c.gradients, c.lane);
            query_tiles.advance(at);
            if (at.left > 0) c.queries.wait_full();
            if (Traits::kRagged && at.left > 0) zero_fill.queries(c.queries.stage, at.tile);
            wgmma_wait<0>();
            wgmma_fence_operand(c.dv);
            if (at.left <= 0) break;
            issue_s(c, p);
            add_both(c, first, second, q);
            wgmma_wait<1>();
            wgmma_fence_operand(p);
            exponentiate(c, p, at.tile);
            wgmma_wait<0>();
            wgmma_fence_operand(c.dk);
            if (arrives_for_warp(c.lane)) c.queries.empty_of(stage).arrive();
            stage = c.queries.stage;
        }
        add_both(c, first, second, uniform(Tiles::q(c.addresses.tiles, stage)));
        wgmma_wait<0>();
        wgmma_fence_operand(c.dk);
        if (arrives_for_warp(c.lane)) c.queries.empty_of(stage).arrive();
    }

    // Issues S of the current stage. The address of K is recomputed, because loop-invariant descriptors of K would take too many
    // registers; kPlain selects the computation that does not spill.
    __device__ __forceinline__ void issue_s(const State& c, Scores& s) const {
        const uint32_t q = uniform(Tiles::q(c.addresses.tiles, c.queries.stage));
        const uint32_t k = kPlain ? uniform(c.addresses.tiles) : q - Tiles::q(0, c.queries.stage);
        Products::template issue_scores<Traits::kBlockM>(s, k, c.addresses.first_row, q);
    }
    // Issues dP of half of the queries, from `first` on.
    __device__ __forceinline__ void issue_dp(const State& c, float (&dp)[kHalf / 2], uint32_t dout, int first) const {
        Products::template issue_scores<kHalf>(dp, Tiles::v_of(c.addresses.tiles), c.addresses.first_row, dout, first);
    }
    // Issues one wgmma group: sums += weights * rows of a tile of Q or dO, for half of the queries.
    __device__ static __forceinline__ void add(typename Products::Sums& sums, const Half& weights, uint32_t queries, int first) {
        wgmma_fence();
        Products::add(sums, weights, queries, first);
        wgmma_commit();
    }
    // dK += dS^T Q.
    __device__ static __forceinline__ void add_both(State& c, const Half& first, const Half& second, uint32_t q) {
        wgmma_fence();
        Products::add(c.dk, first, q, 0);
        Products::add(c.dk, second, q, kHalf);
        wgmma_commit();
    }

    // The shared address of the statistics of the lane's first query from `first` on.
    __device__ __forceinline__ uint32_t statistics(const State& c, int first) const {
        return scores.statistics_of_lane(c.addresses.tiles, c.queries.stage, c.lane) +
               first * static_cast<int>(sizeof(SoftmaxStatistics));
    }
    __device__ __forceinline__ void exponentiate(const State& c, Scores& s, int tile) const {
        scores.exponentiate(s, statistics(c, 0));
        if (!query_tiles.is_edge(tile)) return;
        const int warp = static_cast<int>(threadIdx.x / 32) - 8;  // recomputed, so that it needs no register in the loop
        scores.mask_edge(s, warp * 16, static_cast<int>(threadIdx.x & 31), tile);
    }
};

}  // namespace libflash::cuda::sm90
