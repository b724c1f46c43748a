// The consumer warpgroups of the sm_90a backward kernel: each has 64 keys and keeps their dK and dV in registers. Scores are
// transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T, rounded in registers, are the left operands of dV += P^T dO
// and dK += dS^T Q. Only dS goes through shared memory, to the warpgroup that computes dQ.
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_context.cuh"
#include "cuda/sm90/tma_row_store.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardConsumer {
    using T = typename Traits::T;
    using KvTile = typename Traits::KvTile;
    using QTile = typename Traits::QTile;
    using ScoreTile = typename Traits::ScoreTile;
    static constexpr int kHeadDim = Traits::kHeadDim, kBlockM = Traits::kBlockM, kGroupKeys = Traits::kGroupKeys;
    static constexpr int kScores = kBlockM / 2, kSums = kHeadDim / 2, kSteps = kBlockM / 16;

    const BackwardContext<Traits>& context;

    using RowStore = TmaRowStore<KvTile, kHeadDim>;
    using Fragments = uint32_t[kSteps][4];
    using Operand = uint32_t[kHeadDim / 16][4];

    // State of a consumer warp. In lane 4 g + t, element i of the scores belongs to key g + 8 * (i / 2 % 2) of the warp's 16 keys
    // and to query 8 * (i / 4) + 2 t + i % 2.
    struct State {
        int first_key, lane;  // first key of the warp, in the tile
        PipelineState<Traits::kStages> queries;
        PipelineState<Traits::kScoreStages> gradients;
        Operand k;          // this warp's rows of K; there are no registers for V
        float p[kScores];   // scores, then probabilities
        float ds[kScores];  // dP, then dS
        float dk[kSums], dv[kSums];
    };

    __device__ __forceinline__ void run() const {
        auto& storage = context.storage;
        const int warp = uniform_warp() - 4;
        State c{warp * 16, static_cast<int>(threadIdx.x & 31), PipelineState<Traits::kStages>(storage.queries),
                PipelineState<Traits::kScoreStages>(storage.gradients)};
#pragma unroll
        for (int i = 0; i < kSums; ++i) c.dk[i] = c.dv[i] = 0.0f;
        QueryTilePosition at = storage.first_position(context.params);
        storage.keys().wait(0);
        if (at.left > 0) {
            load_k_operand(c);
            loop_over_queries(c, at);
        }
        named_barrier_wait(1 + warp / 4, 128);  // no warp reads the group's rows of V any more; store() overwrites them
        store(c, c.dv, context.maps.dv, undo_exponent_shift<T>());
        store(c, c.dk, context.maps.dk, undo_exponent_shift<T>() * context.params.softmax_scale);
        if (c.lane == 0) tma_store_wait_read<0>();
    }

private:
    __device__ __forceinline__ void load_k_operand(State& c) const {
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            KvTile::load_fragment(context.tiles.k(), c.first_key, step * 2, c.lane, c.k[step]);
    }

    // S and dP of a tile are issued as soon as their registers are free: before dV and dK of the previous tile, which then
    // overlap the exponentials.
    __device__ __forceinline__ void loop_over_queries(State& c, QueryTilePosition at) const {
        Fragments p, ds;  // P and dS, rounded
        bool edge = context.storage.range.is_edge(at.tile);
        c.queries.wait_full();
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
            if (c.lane == 0) c.queries.empty_of(previous).arrive();
        }
        issue_products(c, stage, p, ds);
        store_ds(c, ds, false);
        publish_ds(c);
        wgmma_wait<0>();
        wgmma_fence_operand(c.dk);
        wgmma_fence_operand(c.dv);
    }
    __device__ __forceinline__ void issue_products(State& c, int stage, const Fragments& p, const Fragments& ds) const {
        wgmma_fence();
        add_product(c.dv, p, context.tiles.dout(stage));
        add_product(c.dk, ds, context.tiles.q(stage));
        wgmma_commit();
    }

    // Computes P and dS, rounded, from S and dP. After the first tile, dV and dK of the previous tile were issued after S and dP,
    // hence the wait counts, and dS of the previous tile, which was stored earlier, is published here. Then advances to the next
    // tile and waits for it. The code between the wgmma waits contains a branch: otherwise the compiler would move it past the
    // last wait.
    template <bool kFirst>
    __device__ __forceinline__ void finish_scores(State& c, QueryTilePosition& at, bool& edge, Fragments& p,
                                                  Fragments& ds) const {
        const SoftmaxStatistics* of_lane = context.tiles.statistics(c.queries.stage) + (c.lane & 3) * 2;
        float numbers[kBlockM / 4];  // LSE, then delta, of this lane's queries; loaded before the wait
#pragma unroll
        for (int i = 0; i < kBlockM / 4; ++i) numbers[i] = of_lane[i / 2 * 8 + i % 2].lse_log2;
        wgmma_wait<kFirst ? 1 : 2>();
        wgmma_fence_operand(c.p);
        exponentiate(c, numbers);
        if (edge) mask_edge(c, at.tile);
        if (!kFirst) publish_ds(c);
        c.queries.advance();
        const bool is_full = c.queries.is_full();
#pragma unroll
        for (int i = 0; i < kBlockM / 4; ++i) numbers[i] = of_lane[i / 2 * 8 + i % 2].delta;
        wgmma_wait<kFirst ? 0 : 1>();
        wgmma_fence_operand(c.ds);
        differentiate(c, numbers);
        context.storage.range.advance(at);
        edge = context.storage.range.is_edge(at.tile);
        if (at.left > 0 && !is_full) c.queries.wait_full();
        wgmma_wait<0>();
        wgmma_fence_operand(c.dk);
        wgmma_fence_operand(c.dv);
        round(p, c.p);
        round(ds, c.ds);
    }

    // Issues S^T = K Q^T and dP^T = V dO^T, one wgmma group each.
    __device__ __forceinline__ void issue_scores(State& c) const {
        const uint32_t q = context.tiles.q(c.queries.stage), dout = context.tiles.dout(c.queries.stage);
        const int first_row = c.first_key / kGroupKeys * kGroupKeys;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            Wgmma<T, kBlockM>::template multiply<false>(c.p, c.k[step], QTile::k_major_operand(q, step), step > 0);
        wgmma_commit();
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            Wgmma<T, kBlockM>::template multiply_shared<false>(c.ds, KvTile::k_major_operand(context.tiles.v(), step, first_row),
                                                               QTile::k_major_operand(dout, step), step > 0);
        wgmma_commit();
    }
    // sums += scores * tile; `queries` is the shared address of a tile of Q or dO.
    __device__ static __forceinline__ void add_product(float (&sums)[kSums], const Fragments& scores, uint32_t queries) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Wgmma<T, kHeadDim>::template multiply<true>(sums, scores[step], QTile::mn_major_operand(queries, step), true);
    }

    // P = exp(S - LSE) * 2^exponent_shift(); the statistics contain the shift.
    __device__ __forceinline__ void exponentiate(State& c, const float (&lse_log2)[kBlockM / 4]) const {
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            c.p[i] = exp2_approx(fmaf(c.p[i], context.params.scale_log2, -lse_log2[i / 4 * 2 + i % 2]));
    }
    // dS = P (dP - delta), with the same factor 2^exponent_shift().
    __device__ static __forceinline__ void differentiate(State& c, const float (&delta)[kBlockM / 4]) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) c.ds[i] = c.p[i] * (c.ds[i] - delta[i / 4 * 2 + i % 2]);
    }
    __device__ static __forceinline__ void round(Fragments& rounded, const float (&x)[kScores]) {
#pragma unroll
        for (int i = 0; i < kSteps * 4; ++i) rounded[i / 4][i % 4] = pack_pair(x[2 * i], x[2 * i + 1], T());
    }

    // Applies the causal mask, the window and the lengths to probabilities: a hidden one becomes 0 whatever its score was.
    __device__ __forceinline__ void mask_edge(State& c, int tile) const {
        const auto& tiles = context.storage.tiles;
        const int lane = hide_from_compiler(c.lane), first_row = tile * kBlockM + (lane & 3) * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Query rows that see the key, relative to this lane's first row: [begin, end).
            const int key = tiles.first_col + c.first_key + r * 8 + (lane >> 2);
            const int begin = key - tiles.shift - tiles.right - first_row;
            const int end = key < tiles.length_k ? min(tiles.length_q, key - tiles.shift + tiles.left + 1) - first_row : -1;
#pragma unroll
            for (int i = 2 * r; i < kScores; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int row = i / 4 * 8 + e;
                    if (row < begin || row >= end) c.p[i + e] = 0.0f;
                }
        }
    }

    // Stores dS for the warpgroup that computes dS K. `stage_is_empty`: the stage was already seen empty.
    __device__ __forceinline__ void store_ds(const State& c, const Fragments& ds, bool stage_is_empty) const {
        if (!stage_is_empty) c.gradients.wait_empty();
        const uint32_t tile = context.tiles.ds(c.gradients.stage);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) ScoreTile::store_fragment(tile, c.first_key, step * 2, c.lane, ds[step]);
    }
    // Publishes the stored dS: the fence makes it visible to wgmma, which reads shared memory through the async proxy.
    __device__ __forceinline__ void publish_ds(State& c) const {
        fence_shared_for_async();
        __syncwarp();
        if (c.lane == 0) c.gradients.full().arrive();
        c.gradients.advance();
    }

    // Writes the warp's rows of dK or dV by TMA, through its rows of V in shared memory.
    __device__ __forceinline__ void store(const State& c, const float (&sums)[kSums], const CUtensorMap& map,
                                          float factor) const {
        RowStore::wait_for_rows(c.lane);
        RowStore::write_rows(context.tiles.v(), c.first_key, c.lane, sums,
                             [&](const float* pair, int) { return pack_pair(pair[0] * factor, pair[1] * factor, T()); });
        if (c.lane != 0) return;
        const auto& storage = context.storage;
        RowStore::store_chunks(context.tiles.v() + c.first_key * 128, [&](uint32_t chunk, int col) {
            tma_store(chunk, map, col, storage.tiles.first_col + c.first_key, storage.work.head, storage.work.batch);
        });
    }
};

}  // namespace libflash::cuda::sm90
