// The scores of the general instance of the sm_90a backward kernel up to 128 channels, with the rare options: from dot products
// to P and dS. The layout is that of backward_scores.cuh, for kChunk queries at a time.
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
struct BackwardRareOptions {
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
    // The origin for the queries of a tile from `first` on, and the warp's keys. `stage`: holds the tile.
    __device__ __forceinline__ ChunkOrigin origin(const QueryTilePosition& at, int stage, int first, int first_key,
                                                  int lane) const {
        return {at.head, at.tile * Traits::kBlockM + first + (lane & 3) * 2,
                context.tile().tiles.first_col + first_key + (lane >> 2), stage, first};
    }

    // Of the lane's scores of several queries, a bit each: whether dropout keeps it, and whether the boolean mask hides it. They
    // are found while the tensor cores compute the scores.
    struct Bits {
        uint32_t keep, hidden;
    };
    // Of kQueries queries. The whole warp calls it.
    template <int kQueries>
    __device__ __forceinline__ Bits bits(const ChunkOrigin& origin, int lane) const {
        return {keep_bits<kQueries>(origin, lane), hidden_bits<kQueries>(origin, lane)};
    }

    // Turns the dot products s and dp into P and dS. The options are applied one after another, because each pass over the scores
    // needs few registers.
    __device__ __forceinline__ void apply(Scores& s, Scores& dp, const ChunkOrigin& origin, const Bits& of, bool edge) const {
        const RareParams& rare = context.params.rare;
        const float factor = rare.dropout.keep_factor;
        const auto kept_term = [&](int i, float delta) { return of.keep >> i & 1 ? fmaf(dp[i], factor, -delta) : -delta; };
        const bool capped = rare.softcap > 0.0f;
        scale_and_cap(s);
        if (capped) {
            for_elements(origin, [&](int i, float, float delta) { dp[i] = kept_term(i, delta); });
            multiply_by_slopes(dp, s);
        }
        add_and_hide(s, origin, of.hidden, edge);
        if (capped) {
            multiply_by_probabilities(s, dp, origin, of.keep, [&](int i, float) { return dp[i]; });
        } else if (rare.dropout.active) {
            multiply_by_probabilities(s, dp, origin, of.keep, kept_term);
        } else {
            multiply_by_probabilities(s, dp, origin, ~0u, [&](int i, float delta) { return dp[i] - delta; });
        }
    }

private:
    template <int kQueries>
    __device__ __forceinline__ uint32_t keep_bits(const ChunkOrigin& origin, int lane) const {
        const DropoutParams& dropout = context.params.rare.dropout;
        if (!dropout.active) return 0xffffffffu;
        const uint32_t head = dropout_head(context.tile().work.batch, context.params.heads_q, origin.head);
        return keep_bits_transposed<kQueries / 8, 1>(dropout, head, origin.row, origin.key - (lane >> 2), lane);
    }
    template <int kQueries>
    __device__ __forceinline__ uint32_t hidden_bits(const ChunkOrigin& origin, int lane) const {
        const ScoreParams& mask = context.params.rare.mask;
        if (!mask.data) return 0;
        const MaskRows rows = rows_of<uint8_t>(mask, rules(origin).mask, origin, lane);
        return cuda::hidden_bits<kQueries>(rows, origin.row - (lane & 3) * 2, lane);
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

    // Whether the scores are multiplied by softmax_scale before other options. Otherwise P is computed from the dot products.
    __device__ __forceinline__ bool in_natural_units() const {
        const RareParams& rare = context.params.rare;
        return rare.softcap > 0.0f || rare.alibi_slopes.data || rare.bias.data || !(context.params.scale_log2 > 0.0f);
    }
    __device__ __forceinline__ void scale_and_cap(Scores& s) const {
        if (!in_natural_units()) return;
        scale_and_cap_quickly(context.params.rare, context.params.softmax_scale, [&](const auto& rule) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) rule(s[i], 0, 0);
        });
    }
    // Multiplies by the slopes of the softcap at the capped scores.
    __device__ __forceinline__ void multiply_by_slopes(Scores& x, const Scores& s) const {
        const float cap = context.params.rare.softcap, inverse = cap > 0.0f ? 1.0f / cap : 0.0f;
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const float capped = s[i] * inverse;
            x[i] *= fmaf(-capped, capped, 1.0f);
        }
    }
    // ALiBi, bias and masks.
    __device__ __forceinline__ void add_and_hide(Scores& s, const ChunkOrigin& origin, uint32_t hidden, bool edge) const {
        const RareParams& rare = context.params.rare;
        if (rare.alibi_slopes.data) subtract_alibi(s, origin);
        if (rare.bias.data) rare.bias.is_float ? add_bias<float>(s, origin) : add_bias<T>(s, origin);
        if (rare.mask.data) {
#pragma unroll
            for (int i = 0; i < kScores; ++i)
                if (hidden >> i & 1) s[i] = -INFINITY;
        }
        if (edge) mask_edge_transposed(context.tile().tiles, origin.row, origin.key, -INFINITY, s);
    }
    // As cuda::subtract_alibi(); below 2^24 the distances are exact.
    __device__ __forceinline__ void subtract_alibi(Scores& s, const ChunkOrigin& origin) const {
        const ScoreRules<T> of_head = rules(origin);
        const float distance = static_cast<float>(origin.row + of_head.alibi_shift - origin.key);
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            s[i] = fmaf(-of_head.slope, fabsf(distance + static_cast<float>(row_of(i) - key_of(i))), s[i]);
    }
    template <class Number>
    __device__ __forceinline__ void add_bias(Scores& s, const ChunkOrigin& origin) const {
        const ScoreRows<Number> bias = rows_of<Number>(context.params.rare.bias, rules(origin).bias, origin, lane());
        add_transposed_bias<kChunk>(s, bias, origin.row - (lane() & 3) * 2, lane());
    }
    // x[i] = P term(i, delta), and s becomes P. P is 0 where dropout removes the probability, x is not.
    template <class Term>
    __device__ __forceinline__ void multiply_by_probabilities(Scores& s, Scores& x, const ChunkOrigin& origin, uint32_t keep,
                                                              const Term& term) const {
        const float unit = in_natural_units() ? kLog2e : context.params.scale_log2;
        for_elements(origin, [&](int i, float lse_log2, float delta) {
            const float exponent = fmaf(s[i], unit, -lse_log2);
            const float p = exp2_approx(min_or_nan(exponent, exponent_shift<T>()));
            x[i] = p * term(i, delta);
            s[i] = keep >> i & 1 ? p : 0.0f;
        });
    }

    // Calls rule(i, LSE, delta) for all elements.
    template <class Rule>
    __device__ __forceinline__ void for_elements(const ChunkOrigin& origin, const Rule& rule) const {
        const uint32_t statistics = shared_address(context.tiles.statistics(origin.stage) + origin.first + (lane() & 3) * 2);
#pragma unroll
        for (int i = 0; i < kScores; i += 4) {
            const float4 two = load_shared_16(statistics + i / 4 * BackwardScores<Traits>::kEightQueries);
#pragma unroll
            for (int e = 0; e < 4; ++e) rule(i + e, e % 2 ? two.z : two.x, e % 2 ? two.w : two.y);
        }
    }
    // Row and key of element i, relative to those of element 0.
    __device__ __forceinline__ static constexpr int row_of(int i) { return i / 4 * 8 + i % 2; }
    __device__ __forceinline__ static constexpr int key_of(int i) { return i / 2 % 2 * 8; }
};

}  // namespace libflash::cuda::sm90
