// The products of a chunk of queries in the general instance of the sm_90a backward kernel up to 128 channels.
#pragma once

#include "cuda/sm90/backward_consumer_state.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardChunkProducts {
    using Products = BackwardProducts<Traits>;
    using Tiles = BackwardSharedTiles<Traits>;
    using State = BackwardSumsState<Traits>;
    static constexpr int kChunk = Traits::kChunk, kScores = kChunk / 2;
    using Scores = float[kScores];
    using Fragments = uint32_t[kChunk / 16][4];

    const BackwardContext<Traits>& context;

    // Where a chunk is in shared memory.
    struct Place {
        int stage = -1, first = 0;  // the stage of its tile (-1: there is no chunk), and its first query in the tile
        __device__ __forceinline__ bool exists() const { return stage >= 0; }
        __device__ __forceinline__ bool ends_tile() const { return first == Traits::kBlockM - kChunk; }
    };

    // Issues S and dP, a wgmma group each.
    __device__ __forceinline__ void issue_scores(const State& c, const Place& chunk, Scores& s, Scores& dp) const {
        const uint32_t k = uniform(context.k()), q = uniform(Tiles::q(c.addresses.tiles, chunk.stage));
        Products::template issue_scores<kChunk>(s, k, c.addresses.first_row, q, chunk.first);
        Products::template issue_scores<kChunk>(dp, Tiles::v_of(k), c.addresses.first_row, Tiles::dout_of(q), chunk.first);
    }
    // Issue dV += P^T dO and dK += dS^T Q, a wgmma group each.
    __device__ __forceinline__ void issue_dv(State& c, const Place& chunk, const Fragments& p) const {
        add(c.dv, p, Tiles::dout_of(uniform(Tiles::q(c.addresses.tiles, chunk.stage))), chunk.first);
    }
    __device__ __forceinline__ void issue_dk(State& c, const Place& chunk, const Fragments& ds) const {
        add(c.dk, ds, uniform(Tiles::q(c.addresses.tiles, chunk.stage)), chunk.first);
    }
    // When all products with the chunk are complete: releases the stage of its tile if this was the last chunk.
    __device__ __forceinline__ void release(const State& c, const Place& chunk) const {
        if (chunk.exists() && chunk.ends_tile() && arrives_for_warp(c.lane)) c.queries.empty_of(chunk.stage).arrive();
    }
    // Stores dS for the dQ warpgroup.
    __device__ __forceinline__ void store_ds(State& c, const Place& chunk, const Fragments& ds) const {
        if (chunk.first == 0) c.gradients.wait_empty();
        Products::store_ds(c.addresses, c.gradients.stage, ds, chunk.first);
        if (chunk.ends_tile()) Products::publish_ds(c.gradients, c.lane);
    }
    __device__ __forceinline__ static void clear(Fragments& x) {
#pragma unroll
        for (int i = 0; i < kChunk / 4; ++i) x[i / 4][i % 4] = 0;
    }

private:
    __device__ __forceinline__ static void add(typename Products::Sums& sums, const Fragments& weights, uint32_t queries,
                                               int first) {
        wgmma_fence();
        Products::add(sums, weights, queries, first);
        wgmma_commit();
    }
};

}  // namespace libflash::cuda::sm90
