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
    using Position = typename BackwardQueryTiles<Traits>::Position;

    BackwardContext<Traits>& context;
    const BackwardQueryTiles<Traits> query_tiles{context};
    const BackwardRareOptions<Traits> scores{context};
    const BackwardZeroFill<Traits> zero_fill{context};
    const ChunkProducts products{context};

    // Adds the tile at `at` and all that follow to dV and dK. No product is in flight at the end of the loop's body: the compiler
    // would serialise the products.
    __device__ __forceinline__ void run(State& c, Position at) const {
        Scores s, dp, next_s, next_dp;
        typename ChunkProducts::Fragments p, ds;  // of the previous chunk
        products.clear(p), products.clear(ds);
        wait_for_tile(c, at);
        Place previous, chunk{c.queries.stage, 0};
        products.issue_scores(c, chunk, s, dp);
        wait_for_scores(s, dp);
        bool more = true;
#pragma unroll 1
        while (more) {
            const auto origin = scores.origin(at, chunk.stage, chunk.first, c.first_key, c.lane);
            const bool edge = query_tiles.is_edge(at.tile);
            const Place next = next_chunk(c, chunk, at, more);
            products.issue_scores(c, next, next_s, next_dp);
            products.issue_sums(c, previous, p, ds);
            scores.apply(s, dp, origin, scores.template bits<Traits::kChunk>(origin, c.lane), edge);
            products.complete_sums(c, previous);
            wait_for_scores(next_s, next_dp);
            products.round(c, chunk, s, dp, p, ds);
#pragma unroll
            for (int i = 0; i < ChunkProducts::kScores; ++i) s[i] = next_s[i], dp[i] = next_dp[i];
            previous = chunk, chunk = next;
        }
        products.issue_sums(c, previous, p, ds);
        products.complete_sums(c, previous);
    }

private:
    __device__ __forceinline__ void wait_for_tile(const State& c, const Position& at) const {
        c.queries.wait_full();
        zero_fill.queries(c.queries.stage, at.tile);
    }
    __device__ __forceinline__ static void wait_for_scores(Scores& s, Scores& dp) {
        wgmma_wait<0>();
        wgmma_fence_operand(s);
        wgmma_fence_operand(dp);
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
