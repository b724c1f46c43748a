// The consumer warpgroups of the general instance of the sm_90a backward kernel for head_dim up to 128: as in
// backward_dk_dv.cuh, with block masks and the rare options. The options need registers, so the products of two chunks do not
// overlap, K is read from shared memory, and kChunk queries of a tile are processed at a time.
#pragma once

#include "cuda/sm90/backward_consumer_state.cuh"
#include "cuda/sm90/backward_epilogue.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"
#include "cuda/sm90/backward_rare_options.cuh"
#include "cuda/sm90/backward_scores.cuh"
#include "cuda/sm90/backward_work_tiles.cuh"
#include "cuda/sm90/backward_zero_fill.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardGeneralConsumer {
    using T = typename Traits::T;
    using Products = BackwardProducts<Traits>;
    using Tiles = BackwardSharedTiles<Traits>;
    using State = BackwardSumsState<Traits>;
    using Scores = typename BackwardRareOptions<Traits>::Scores;
    using Position = typename BackwardQueryTiles<Traits>::Position;
    static constexpr int kChunk = Traits::kChunk, kSteps = kChunk / 16;
    using Fragments = uint32_t[kSteps][4];

    BackwardContext<Traits>& context;
    const BackwardWorkTiles<Traits> work_tiles{context};
    const BackwardQueryTiles<Traits> query_tiles{context};
    const BackwardRareOptions<Traits> options{context};
    const BackwardZeroFill<Traits> zero_fill{context};
    const BackwardEpilogue<Traits> epilogue{context};

    __device__ __forceinline__ void run() const {
        const int warp = consumer_warp<Traits>();
        State c(context, warp, static_cast<int>(threadIdx.x & 31));
#pragma unroll 1
        while (work_tiles.wait()) {
            c.clear();
            work_tiles.wait_for_k();
            zero_fill.keys(context.k(), c.addresses.first_row, Traits::kGroupKeys);
            work_tiles.wait_for_v();
            zero_fill.keys(context.v(), c.addresses.first_row, Traits::kGroupKeys);
#pragma unroll 1
            for (auto at = query_tiles.first(); at.left > 0; query_tiles.advance(at)) add_tile(c, at);
            work_tiles.release_k(c.lane);
            work_tiles.release_v(c.lane);
            c.gradients.wait_all_empty();
            const auto rows = epilogue.rows_through_scores(c.first_key);
            epilogue.store_dv(rows, c.lane, c.dv, undo_exponent_shift<T>() * context.params.rare.dropout.keep_factor);
            epilogue.store_dk(rows, c.lane, c.dk, undo_exponent_shift<T>() * context.params.softmax_scale);
            epilogue.wait(c.lane);
            work_tiles.release();
        }
    }

private:
    __device__ __forceinline__ void add_tile(State& c, const Position& at) const {
        const bool edge = query_tiles.is_edge(at.tile);
        c.queries.wait_full();
        zero_fill.queries(c.queries.stage, at.tile);
#pragma unroll 1
        for (int first = 0; first < Traits::kBlockM; first += kChunk) add_chunk(c, at, first, edge);
        if (arrives_for_warp(c.lane)) c.queries.empty().arrive();
        c.queries.advance();
    }

    __device__ __forceinline__ void add_chunk(State& c, const Position& at, int first, bool edge) const {
        switch (options.inputs()) {
            case ScoreInputs::none: return add_chunk_with<ScoreInputs::none>(c, at, first, edge);
            case ScoreInputs::dropout:
                if constexpr (BackwardRareOptions<Traits>::kOwnDropout)
                    return add_chunk_with<ScoreInputs::dropout>(c, at, first, edge);
                break;
            case ScoreInputs::mask: return add_chunk_with<ScoreInputs::mask>(c, at, first, edge);
            case ScoreInputs::bias: return add_chunk_with<ScoreInputs::bias>(c, at, first, edge);
        }
    }
    // Adds kChunk queries of a tile, from `first` on.
    template <ScoreInputs kInputs>
    __device__ __forceinline__ void add_chunk_with(State& c, const Position& at, int first, bool edge) const {
        const uint32_t k = uniform(context.k()), q = uniform(Tiles::q(c.addresses.tiles, c.queries.stage)),
                       dout = Tiles::dout_of(q);
        const auto origin = options.origin(at, c.queries.stage, first, c.first_key, c.lane);
        // Before the products, because a warp waits while it issues them.
        auto loaded = options.template load<kInputs>(origin, c.lane);
        Scores p, ds;
        Products::template issue_scores<kChunk>(p, k, c.addresses.first_row, q, first);
        Products::template issue_scores<kChunk>(ds, Tiles::v_of(k), c.addresses.first_row, dout, first);
        const auto bits = options.template bits<kInputs>(origin, loaded, c.lane);
        if (first == 0) c.gradients.wait_empty();
        wgmma_wait<0>();
        wgmma_fence_operand(p);
        wgmma_fence_operand(ds);
        options.template apply<kInputs>(p, ds, origin, bits, loaded, edge);
        Fragments rounded_p, rounded_ds;
        BackwardScores<Traits>::round(rounded_p, p);
        BackwardScores<Traits>::round(rounded_ds, ds);
        wgmma_fence();
        Products::add(c.dv, rounded_p, dout, first);
        Products::add(c.dk, rounded_ds, q, first);
        wgmma_commit();
        Products::store_ds(c.addresses, c.gradients.stage, rounded_ds, first);
        if (first == Traits::kBlockM - kChunk) Products::publish_ds(c.gradients, c.lane);
        wgmma_wait<0>();
        wgmma_fence_operand(c.dk);
        wgmma_fence_operand(c.dv);
    }
};

}  // namespace libflash::cuda::sm90
