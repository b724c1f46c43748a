// The loop over the queries of a work tile in the general instance of the sm_90a backward kernel, up to 64 channels, where there
// are registers for a pipeline: while the options of a chunk of queries are applied, the tensor cores compute S and dP of the
// next chunk, and dV and dK of the previous one.
#pragma once

#include "cuda/sm90/backward_chunk_products.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"
#include "cuda/sm90/backward_rare_options.cuh"
#include "cuda/sm90/backward_zero_fill.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardChunkPipeline {
    using ChunkProducts = BackwardChunkProducts<Traits>;
    using State = typename ChunkProducts::State;
    using Place = typename ChunkProducts::Place;
    using Scores = typename ChunkProducts::Scores;
    using Fragments = typename ChunkProducts::Fragments;
    using Position = typename BackwardQueryTiles<Traits>::Position;

    BackwardContext<Traits>& context;
    const BackwardQueryTiles<Traits> query_tiles{context};
    const BackwardRareOptions<Traits> scores{context};
    const BackwardZeroFill<Traits> zero_fill{context};
    const ChunkProducts products{context};

    // Adds the tile at `at` and all that follow to dV and dK. No product is in flight at the end of the loop's body: the compiler
    // would serialise the products.
    __device__ __forceinline__ void run(State& c, Position at) const {
        Scores s, dp;
        Fragments p, ds;  // of the previous chunk
        products.clear(p), products.clear(ds);
        wait_for_tile(c, at);
        Place previous, chunk{c.queries.stage, 0};
        products.issue_scores(c, chunk, s, dp);
        wgmma_wait<0>();
        wgmma_fence_operand(s);
        wgmma_fence_operand(dp);
        bool more = true;
#pragma unroll 1
        while (more) {
            const auto origin = scores.origin(at, chunk.stage, chunk.first, c.first_key, c.lane);
            const bool edge = query_tiles.is_edge(at.tile);
            const Place next = next_chunk(c, chunk, at, more);
            Scores next_s, next_dp;
            products.issue_scores(c, next, next_s, next_dp);
            if (previous.exists()) issue_sums(c, previous, p, ds);
            scores.apply(s, dp, origin, scores.template bits<Traits::kChunk>(origin, c.lane), edge);
            wait_for_sums(c);
            wgmma_fence_operand(next_s);
            wgmma_fence_operand(next_dp);
            products.release(c, previous);
            BackwardScores<Traits>::round(p, s);
            BackwardScores<Traits>::round(ds, dp);
            products.store_ds(c, chunk, ds);
#pragma unroll
            for (int i = 0; i < ChunkProducts::kScores; ++i) s[i] = next_s[i], dp[i] = next_dp[i];
            previous = chunk, chunk = next;
        }
        issue_sums(c, previous, p, ds);
        wait_for_sums(c);
        products.release(c, previous);
    }

private:
    __device__ __forceinline__ void wait_for_tile(const State& c, const Position& at) const {
        c.queries.wait_full();
        zero_fill.queries(c.queries.stage, at.tile);
    }
    __device__ __forceinline__ void issue_sums(State& c, const Place& chunk, const Fragments& p, const Fragments& ds) const {
        products.issue_dv(c, chunk, p);
        products.issue_dk(c, chunk, ds);
    }
    __device__ __forceinline__ static void wait_for_sums(State& c) {
        wgmma_wait<0>();
        wgmma_fence_operand(c.dk);
        wgmma_fence_operand(c.dv);
    }
    // The chunk after this one, whose tile is then at `at`. If there is none: the same chunk, whose scores are computed in vain.
    __device__ __forceinline__ Place next_chunk(State& c, const Place& chunk, Position& at, bool& more) const {
        if (!chunk.ends_tile()) return {chunk.stage, chunk.first + Traits::kChunk};
        c.queries.advance();
        query_tiles.advance(at);
        more = at.left > 0;
        if (!more) return chunk;
        wait_for_tile(c, at);
        return {c.queries.stage, 0};
    }
};

}  // namespace libflash::cuda::sm90
