// The consumer warpgroups of the general instance of the sm_90a backward kernel: those of backward_dk_dv.cuh with block masks and
// the rare options. These need registers, so the products of two tiles do not overlap, K is read from shared memory, and a tile
// is processed kChunk queries at a time.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"
#include "cuda/sm90/backward_rare_options.cuh"
#include "cuda/sm90/backward_zero_fill.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardGeneralConsumer {
    using T = typename Traits::T;
    using KvTile = typename Traits::KvTile;
    using QTile = typename Traits::QTile;
    using ScoreTile = typename Traits::ScoreTile;
    using Scores = typename BackwardRareOptions<Traits>::Scores;
    static constexpr int kHeadDim = Traits::kHeadDim, kGroupKeys = Traits::kGroupKeys, kChunk = Traits::kChunk;
    static constexpr int kSums = kHeadDim / 2, kSteps = kChunk / 16;
    using Fragments = uint32_t[kSteps][4];

    const BackwardContext<Traits>& context;
    const BackwardQueryTiles<Traits> query_tiles{context};
    const BackwardRareOptions<Traits> scores{context};
    const BackwardZeroFill<Traits> zero_fill{context};
    const BackwardEpilogue<Traits> epilogue{context};

    // State of a consumer warp.
    struct State {
        int first_key, lane;  // first key of the warp, in the tile
        PipelineState<Traits::kStages> queries;
        PipelineState<Traits::kScoreStages> gradients;
        float dk[kSums], dv[kSums];
    };

    __device__ __forceinline__ void run() const {
        auto& storage = context.storage;
        const int warp = uniform_warp() - 4;
        State c{warp * 16, static_cast<int>(threadIdx.x & 31), PipelineState<Traits::kStages>(storage.queries),
                PipelineState<Traits::kScoreStages>(storage.gradients)};
#pragma unroll
        for (int i = 0; i < kSums; ++i) c.dk[i] = c.dv[i] = 0.0f;
        storage.keys().wait(0);
        zero_fill.keys();
#pragma unroll 1
        for (auto at = query_tiles.first(); at.left > 0; query_tiles.advance(at)) add_tile(c, at);
        named_barrier_wait(1 + warp / 4, 128);  // no warp reads the group's rows of V any more; the epilogue overwrites them
        epilogue.store_dv(c.first_key, c.lane, c.dv, undo_exponent_shift<T>() * context.params.rare.dropout.keep_factor);
        epilogue.store_dk(c.first_key, c.lane, c.dk, undo_exponent_shift<T>() * context.params.softmax_scale);
        if (c.lane == 0) tma_store_wait_read<0>();
    }

private:
    __device__ __forceinline__ void add_tile(State& c, const QueryTilePosition& at) const {
        const bool edge = query_tiles.is_edge(at.tile);
        c.queries.wait_full();
        zero_fill.queries(c.queries.stage, at.tile);
#pragma unroll 1
        for (int first = 0; first < Traits::kBlockM; first += kChunk) add_chunk(c, at, first, edge);
        if (c.lane == 0) c.queries.empty().arrive();
        c.queries.advance();
        publish_ds(c);
    }

    // The queries from `first` on of a tile.
    __device__ __forceinline__ void add_chunk(State& c, const QueryTilePosition& at, int first, bool edge) const {
        const uint32_t q = context.tiles.q(c.queries.stage), dout = context.tiles.dout(c.queries.stage);
        Scores p, ds;
        issue_scores(c, p, context.tiles.k(), q, first);
        issue_scores(c, ds, context.tiles.v(), dout, first);
        const auto place = scores.place(at, c.queries.stage, first, c.first_key, c.lane);
        const uint32_t keep = scores.keep_bits(place, c.lane);
        if (first == 0) c.gradients.wait_empty();
        wgmma_wait<0>();
        wgmma_fence_operand(p);
        wgmma_fence_operand(ds);
        scores.apply(p, ds, place, keep, edge);
        Fragments rounded_p, rounded_ds;
        round(rounded_p, p);
        round(rounded_ds, ds);
        wgmma_fence();
        add_product(c.dv, rounded_p, dout, first);
        add_product(c.dk, rounded_ds, q, first);
        wgmma_commit();
        store_ds(c, rounded_ds, first);
        wgmma_wait<0>();
        wgmma_fence_operand(c.dk);
        wgmma_fence_operand(c.dv);
    }

    // Issues S^T = K Q^T or dP^T = V dO^T.
    __device__ __forceinline__ void issue_scores(const State& c, Scores& products, uint32_t keys, uint32_t queries,
                                                 int first) const {
        const int first_row = c.first_key / kGroupKeys * kGroupKeys;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            Wgmma<T, kChunk>::template multiply_shared<false>(products, KvTile::k_major_operand(keys, step, first_row),
                                                              QTile::k_major_operand(queries, step, first), step > 0);
        wgmma_commit();
    }
    // sums += weights * rows of a tile of Q or dO.
    __device__ static __forceinline__ void add_product(float (&sums)[kSums], const Fragments& weights, uint32_t queries,
                                                       int first) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Wgmma<T, kHeadDim>::template multiply<true>(sums, weights[step], QTile::mn_major_operand(queries, first / 16 + step),
                                                        true);
    }
    __device__ static __forceinline__ void round(Fragments& rounded, const Scores& x) {
#pragma unroll
        for (int i = 0; i < kSteps * 4; ++i) rounded[i / 4][i % 4] = pack_pair(x[2 * i], x[2 * i + 1], T());
    }

    // Stores dS for the warpgroup that computes dS K.
    __device__ __forceinline__ void store_ds(const State& c, const Fragments& ds, int first) const {
        const uint32_t tile = context.tiles.ds(c.gradients.stage);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            ScoreTile::store_fragment(tile, c.first_key, first / 8 + step * 2, c.lane, ds[step]);
    }
    // Publishes the stored dS: the fence makes it visible to wgmma, which reads shared memory through the async proxy.
    __device__ __forceinline__ void publish_ds(State& c) const {
        fence_shared_for_async();
        __syncwarp();
        if (c.lane == 0) c.gradients.full().arrive();
        c.gradients.advance();
    }
};

}  // namespace libflash::cuda::sm90
