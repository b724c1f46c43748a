// The scores of the general instance of the sm_90a backward kernel, with the rare options: from dot products to P and dS. The
// layout is that of backward_scores.cuh, for kChunk queries at a time.
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/rare_gradients.cuh"
#include "cuda/sm90/backward_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardRareOptions {
    using T = typename Traits::T;
    static constexpr int kChunk = Traits::kChunk, kScores = kChunk / 2;
    using Scores = float[kScores];

    const BackwardContext<Traits>& context;

    // The position of a lane's scores in the matrix of scores.
    struct ChunkOrigin {
        int head;                  // query head
        int row, key;              // the lane's first query row and key in their sequences
        const float4* statistics;  // statistics[4 * n]: (LSE, delta) of the two rows in elements 4 n to 4 n + 3
    };
    // The origin for the queries of a tile from `first` on, and the warp's keys. `stage`: holds the tile.
    __device__ __forceinline__ ChunkOrigin origin(const QueryTilePosition& at, int stage, int first, int first_key,
                                                  int lane) const {
        return {at.head, at.tile * Traits::kBlockM + first + (lane & 3) * 2,
                context.tile().tiles.first_col + first_key + (lane >> 2),
                reinterpret_cast<const float4*>(context.tiles.statistics(stage) + first + (lane & 3) * 2)};
    }

    // The dropout mask: bit i is set if element i is kept. The whole warp calls it.
    __device__ __forceinline__ uint32_t keep_bits(const ChunkOrigin& origin, int lane) const {
        const DropoutParams& dropout = context.params.rare.dropout;
        if (!dropout.active) return 0xffffffffu;
        const uint32_t head = dropout_head(context.tile().work.batch, context.params.heads_q, origin.head);
        return keep_bits_transposed<kChunk / 8, 1>(dropout, head, origin.row, origin.key - (lane >> 2), lane);
    }

    // Turns the dot products s and dp into P and dS.
    __device__ __forceinline__ void apply(Scores& s, Scores& dp, const ChunkOrigin& origin, uint32_t keep, bool edge) const {
        const auto& tiles = context.tile().tiles;
        const auto at = [&](int i) -> GradientElement {
            const float4 f = origin.statistics[i / 4 * 4];
            return {
                s[i], dp[i], origin.row + i / 4 * 8 + i % 2, origin.key + i / 2 % 2 * 8, i % 2 ? f.z : f.x, i % 2 ? f.w : f.y};
        };
        const int alibi_shift = tiles.length_k - tiles.length_q;
        apply_rare_options<T, kScores>(context.params.rare, context.params.softmax_scale, tiles, alibi_shift, origin.head, keep,
                                       at, [&] {
                                           if (edge) mask_edge_transposed(tiles, origin.row, origin.key, -INFINITY, s);
                                       });
    }
};

}  // namespace libflash::cuda::sm90
