// The consumer warpgroups of the general instance of the sm_90a backward kernel for head_dim up to 128: as in
// backward_dk_dv.cuh, with block masks and the rare options. The options need registers, so K is read from shared memory, and
// kChunk queries of a tile are processed at a time. While the options of a chunk are applied, the tensor cores compute dK of the
// previous one.
#pragma once

#include "cuda/sm90/backward_chunk_pipeline.cuh"
#include "cuda/sm90/backward_chunk_products.cuh"
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
    using ChunkProducts = BackwardChunkProducts<Traits>;
    using State = typename ChunkProducts::State;
    using Place = typename ChunkProducts::Place;
    using Fragments = typename ChunkProducts::Fragments;
    using Position = typename BackwardQueryTiles<Traits>::Position;
    static constexpr int kChunk = Traits::kChunk;

    BackwardContext<Traits>& context;
    const BackwardWorkTiles<Traits> work_tiles{context};
    const BackwardQueryTiles<Traits> query_tiles{context};
    const BackwardRareOptions<Traits> scores{context};
    const BackwardZeroFill<Traits> zero_fill{context};
    const BackwardEpilogue<Traits> epilogue{context};
    const ChunkProducts products{context};

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
            if (const auto at = query_tiles.first(); at.left > 0) add_tiles(c, at);
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
    __device__ __forceinline__ void add_tiles(State& c, Position at) const {
        if constexpr (Traits::kHeadDim <= 64) {
            BackwardChunkPipeline<Traits>{context}.run(c, at);
        } else {
            Fragments ds;  // of the previous chunk
            products.clear(ds);
            Place previous;
#pragma unroll 1
            for (; at.left > 0; query_tiles.advance(at)) {
                c.queries.wait_full();
                zero_fill.queries(c.queries.stage, at.tile);
#pragma unroll 1
                for (int first = 0; first < Traits::kBlockM; first += kChunk) {
                    const Place chunk{c.queries.stage, first};
                    add_chunk(c, at, chunk, previous, ds);
                    previous = chunk;
                }
                c.queries.advance();
            }
            products.issue_dk(c, previous, ds);
            wgmma_wait<0>();
            wgmma_fence_operand(c.dk);
            products.release(c, previous);
        }
    }
    // Computes P and dS of a chunk, adds P^T dO to dV, and dS^T Q of the previous chunk to dK. `ds`: rounded dS of the previous
    // chunk, then of this one. No product is in flight at the end: the compiler would serialise the products.
    __device__ __forceinline__ void add_chunk(State& c, const Position& at, const Place& chunk, const Place& previous,
                                              Fragments& ds) const {
        typename ChunkProducts::Scores s, dp;
        products.issue_scores(c, chunk, s, dp);
        if (previous.exists()) {
            products.issue_dk(c, previous, ds);
        } else {
            wgmma_commit();  // so that a group follows S and dP in any case
        }
        const auto origin = scores.origin(at, chunk.stage, chunk.first, c.first_key, c.lane);
        const auto bits = scores.template bits<kChunk>(origin, c.lane);
        wgmma_wait<1>();
        wgmma_fence_operand(s);
        wgmma_fence_operand(dp);
        scores.apply(s, dp, origin, bits, query_tiles.is_edge(at.tile));
        wgmma_wait<0>();
        wgmma_fence_operand(c.dk);
        products.release(c, previous);
        Fragments p;
        BackwardScores<Traits>::round(p, s);
        BackwardScores<Traits>::round(ds, dp);
        products.issue_dv(c, chunk, p);
        products.store_ds(c, chunk, ds);
        wgmma_wait<0>();
        wgmma_fence_operand(c.dv);
    }
};

}  // namespace libflash::cuda::sm90
