// What backward_rare_options.cuh and backward_divided_options.cuh have in common: where a chunk of queries is in the matrix of
// scores, the bits of dropout, and single steps of the options. The layout is that of backward_scores.cuh, for kChunk
// queries.
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/quick_softcap.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/transposed_bias.cuh"
#include "cuda/attention/transposed_mask.cuh"
#include "cuda/sm90/backward_scores.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardChunkOptions {
    using T = typename Traits::T;
    static constexpr int kChunk = Traits::kChunk, kScores = kChunk / 2;
    using Scores = float[kScores];

    const BackwardContext<Traits>& context;

    // The position of a lane's scores in the matrix of scores.
    struct ChunkOrigin {
        int head;          // query head
        int row, key;      // the lane's first query row and key in their sequences
        int stage, first;  // the stage that holds the statistics, and the chunk's first query in it
    };
    // The origin of a chunk: queries from `first` on of the tile at `at`, whose Q and statistics are in `stage`, and the warp's
    // keys.
    __device__ __forceinline__ ChunkOrigin origin(const QueryTilePosition& at, int stage, int first, int first_key,
                                                  int lane) const {
        return {at.head, at.tile * Traits::kBlockM + first + (lane & 3) * 2,
                context.tile().tiles.first_col + first_key + (lane >> 2), stage, first};
    }

    // A bit for each of the lane's scores: `keep`: dropout keeps it; `hidden`: the boolean mask hides it. They are found while
    // the tensor cores compute the scores.
    struct Bits {
        uint32_t keep = 0xffffffffu, hidden = 0;
    };

protected:
    // Of kQueries queries, if there is dropout. The whole warp calls it.
    template <int kQueries>
    __device__ __forceinline__ uint32_t keep_bits(const ChunkOrigin& origin, int lane) const {
        const DropoutParams& dropout = context.params.rare.dropout;
        const uint32_t batch_head = dropout_head(context.tile().work.batch, context.params.heads_q, origin.head);
        return keep_bits_transposed<kQueries / 8, 1>(dropout, batch_head, origin.row, origin.key - (lane >> 2), lane);
    }
    __device__ __forceinline__ MaskRows mask_rows(const ChunkOrigin& origin, int lane) const {
        return rows_of<uint8_t>(context.params.rare.mask, rules(origin).mask, origin, lane);
    }

    __device__ __forceinline__ ScoreRules<T> rules(const ChunkOrigin& origin) const {
        const auto& tiles = context.tile().tiles;
        ScoreRules<T> of_head;
        of_head.init(context.params.rare, tiles.batch, origin.head, tiles.length_k - tiles.length_q);
        return of_head;
    }
    // The bias or the mask from the warp's first key on.
    template <class Number>
    __device__ __forceinline__ ScoreRows<Number> rows_of(const ScoreParams& tensor, const void* of_head,
                                                         const ChunkOrigin& origin, int lane) const {
        const auto& tiles = context.tile().tiles;
        return {tensor, of_head, origin.key - (lane >> 2), tiles.length_q, tiles.length_k};
    }
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x & 31); }

    // Row and key of element i, relative to those of element 0.
    __device__ __forceinline__ static constexpr int row_of(int i) { return i / 4 * 8 + i % 2; }
    __device__ __forceinline__ static constexpr int key_of(int i) { return i / 2 % 2 * 8; }
    // Calls rule(i, slope) with the slopes of the softcap at the capped scores; 1 without softcap.
    template <class Rule>
    __device__ __forceinline__ void for_slopes(const Scores& s, const Rule& rule) const {
        const float cap = context.params.rare.softcap, inverse = cap > 0.0f ? 1.0f / cap : 0.0f;
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const float capped = s[i] * inverse;
            rule(i, fmaf(-capped, capped, 1.0f));
        }
    }
    // s = factor * s + bias. `kPairs`: whether pairs of a bias of type T can be loaded here.
    template <bool kPairs = true>
    __device__ __forceinline__ void add_bias(Scores& s, float factor, const void* of_head, const ChunkOrigin& origin) const {
        if (context.params.rare.bias.is_float) {
            add_bias_of<float, true>(s, factor, of_head, origin);
        } else {
            add_bias_of<T, kPairs>(s, factor, of_head, origin);
        }
    }
    // Hides scores by the boolean mask (`masked`: there is one), the causal mask, the window and the lengths. `edge`: whether the
    // tile is one that the last three hide a part of.
    __device__ __forceinline__ void hide(Scores& s, const ChunkOrigin& origin, bool masked, uint32_t hidden, bool edge) const {
        if (masked) {
#pragma unroll
            for (int i = 0; i < kScores; ++i)
                if (hidden >> i & 1) s[i] = -INFINITY;
        }
        if (edge) mask_edge_transposed(context.tile().tiles, origin.row, origin.key, -INFINITY, s);
    }

private:
    template <class Number, bool kPairs>
    __device__ __forceinline__ void add_bias_of(Scores& s, float factor, const void* of_head, const ChunkOrigin& origin) const {
        const int lane = this->lane();
        const ScoreRows<Number> bias = rows_of<Number>(context.params.rare.bias, of_head, origin, lane);
        const int row = origin.row - (lane & 3) * 2;
        if constexpr (kPairs) {
            add_transposed_bias<kChunk>(s, factor, bias, row, lane);
        } else {
            add_single_numbers<kChunk>(s, factor, bias, row, lane);
        }
    }
};

}  // namespace libflash::cuda::sm90
