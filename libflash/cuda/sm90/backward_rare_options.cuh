// The scores of the general instance of the sm_90a backward kernel, with the rare options: from dot products to P and dS. The
// layout is that of backward_scores.cuh, for kChunk queries at a time.
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/sm90/backward_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardRareOptions {
    using T = typename Traits::T;
    static constexpr int kChunk = Traits::kChunk, kScores = kChunk / 2;
    using Scores = float[kScores];

    const BackwardContext<Traits>& context;

    // Where the scores of a lane are.
    struct Place {
        int head;                  // query head
        int row, key;              // the lane's first ones in their sequences
        const float4* statistics;  // statistics[4 * n]: (LSE, delta) of the two rows in elements 4 n to 4 n + 3
    };
    // Of the queries from `first` on of a tile in a stage, and the warp's keys.
    __device__ __forceinline__ Place place(const QueryTilePosition& at, int stage, int first, int first_key, int lane) const {
        return {at.head, at.tile * Traits::kBlockM + first + (lane & 3) * 2,
                context.storage.tiles.first_col + first_key + (lane >> 2),
                reinterpret_cast<const float4*>(context.tiles.statistics(stage) + first + (lane & 3) * 2)};
    }

    // The dropout mask: bit i is set if element i is kept. The whole warp calls it.
    __device__ __forceinline__ uint32_t keep_bits(const Place& place, int lane) const {
        const DropoutParams& dropout = context.params.rare.dropout;
        if (!dropout.active) return 0xffffffffu;
        const uint32_t head = dropout_head(context.storage.work.batch, context.params.heads_q, place.head);
        return keep_bits_transposed<kChunk / 8, 1>(dropout, head, place.row, place.key - (lane >> 2), lane);
    }

    // From dot products s and dp to P and dS, the gradient of the scaled dot product before the softcap, both times
    // 2^exponent_shift(). Each step updates dp as soon as its factor is known, so that no other values are kept.
    __device__ __forceinline__ void apply(Scores& s, Scores& dp, const Place& place, uint32_t keep, bool edge) const {
        const RareParams& rare = context.params.rare;
        const auto& tiles = context.storage.tiles;
        const auto for_all = [&](const auto& rule) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) rule(s[i], place.row + i / 4 * 8 + i % 2, place.key + i / 2 % 2 * 8);
        };
        const auto for_each = [&](const auto& rule) {
            for_all([&](float& x, int row, int key) {
                if (row < tiles.length_q && key < tiles.length_k) rule(x, row, key);
            });
        };
        scale_and_cap(rare, context.params.softmax_scale, for_all);
        start_gradients(s, dp, place, keep);
        ScoreRules<T> rules;
        rules.init(rare, context.storage.work.batch, place.head, tiles.length_q, tiles.length_k);
        add_and_hide<T>(rare, rules, for_all, for_each);
        if (edge) mask_edge_transposed(tiles, place.row, place.key, -INFINITY, s);
        finish(s, dp, place, keep);
    }

private:
    // dp becomes (keep dp / (1 - p_drop) - delta) times the slope of the softcap.
    __device__ __forceinline__ void start_gradients(const Scores& capped, Scores& dp, const Place& place, uint32_t keep) const {
        const RareParams& rare = context.params.rare;
        const float inverse = rare.softcap > 0.0f ? 1.0f / rare.softcap : 0.0f;
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const float4 f = place.statistics[i / 4 * 4];
            const float ratio = capped[i] * inverse, slope = fmaf(-ratio, ratio, 1.0f);
            dp[i] = ((keep >> i & 1 ? dp[i] * rare.dropout.keep_factor : 0.0f) - (i % 2 ? f.w : f.y)) * slope;
        }
    }
    // Scores become probabilities, without those that dropout removes; dp becomes dS.
    __device__ __forceinline__ void finish(Scores& s, Scores& dp, const Place& place, uint32_t keep) const {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const float4 f = place.statistics[i / 4 * 4];
            const float p = exp2_approx(min_or_nan(s[i] - (i % 2 ? f.z : f.x), exponent_shift<T>()));
            dp[i] *= p;
            s[i] = keep >> i & 1 ? p : 0.0f;
        }
    }
};

}  // namespace libflash::cuda::sm90
