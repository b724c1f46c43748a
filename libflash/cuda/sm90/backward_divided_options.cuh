// The rare options in the general instance of the sm_90a backward kernel with more than 128 channels, where the consumer
// warpgroups divide the products. The layout is that of backward_scores.cuh, for kChunk queries at a time. Up to 128 channels:
// backward_rare_options.cuh, whose passes have fewer instructions, but spill here.
#pragma once

#include "cuda/attention/rare_gradients.cuh"
#include "cuda/sm90/backward_chunk_options.cuh"

namespace libflash::cuda::sm90 {

// Turns the dot product s into p, and dp into p times steps.differentiate(). at(i) gives element i of kCount; bit i of `keep`
// says whether dropout keeps it. `tiles`: a QueryTiles. alibi_shift: the key at distance 0 of row 0. Each step updates dp as soon
// as its factor is known, so that no other values need registers. `steps`: see BackwardDividedOptions::Steps.
template <class T, int kCount, class Tiles, class ElementAt, class Steps>
__device__ __forceinline__ void apply_rare_steps(const RareParams& rare, float softmax_scale, const Tiles& tiles, int alibi_shift,
                                                 int head, uint32_t keep, const ElementAt& at, const Steps& steps) {
    const auto for_all = [&](const auto& rule) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const GradientElement x = at(i);
            rule(x.s, x.row, x.key);
        }
    };
    const auto for_each = [&](const auto& rule) {
        for_all([&](float& score, int row, int key) {
            if (row < tiles.length_q && key < tiles.length_k) rule(score, row, key);
        });
    };
    steps.scale(softmax_scale, for_all);
    const float inverse = steps.before_softcap() && rare.softcap > 0.0f ? 1.0f / rare.softcap : 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const GradientElement x = at(i);
        const float capped = x.s * inverse, slope = fmaf(-capped, capped, 1.0f);
        x.dp = steps.differentiate(x, slope, keep >> i & 1);
    }
    ScoreRules<T> rules;
    rules.init(rare, tiles.batch, head, alibi_shift);
    steps.apply_own(rules);
    add_and_hide<T>(rare, rules, for_all, for_each);
    steps.hide();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const GradientElement x = at(i);
        x.s = exp2_approx(min_or_nan(x.s - x.lse_log2, steps.largest_exponent()));
        x.dp *= x.s;
        if (!(keep >> i & 1)) x.s = 0.0f;
    }
}

template <class Traits>
struct BackwardDividedOptions : BackwardChunkOptions<Traits> {
    using Base = BackwardChunkOptions<Traits>;
    using Base::context, Base::kScores, Base::kChunk;
    using typename Base::Bits, typename Base::ChunkOrigin, typename Base::Scores, typename Base::T;

    // For consumers that divide the products, where only the other warpgroup has dP. Turns the dot products into P times
    // 2^kProbabilityShift; `weights` gets what the other warpgroup needs for dS: P times the slope of the softcap, with the sign
    // bit where dropout removes the probability (differentiate_kept()). `of`: its first bits are those of the chunk.
    __device__ __forceinline__ void apply_to_values(Scores& s, Scores& weights, const ChunkOrigin& origin, const Bits& of,
                                                    bool edge) const {
        apply(s, weights, origin, of, edge, [](const GradientElement&, float slope, bool) { return slope; });
#pragma unroll
        for (int i = 0; i < kScores; ++i) weights[i] = of.keep >> i & 1 ? fabsf(weights[i]) : -fabsf(weights[i]);
    }

    // dS for 16 queries from dP, x[8 * step] to x[8 * step + 7], and rounded weights of apply_to_values(). `statistics`: the
    // shared address of those of the lane's first query.
    template <int kCount>
    __device__ __forceinline__ void differentiate_kept(float (&x)[kCount], const uint32_t (&weights)[4], int step,
                                                       uint32_t statistics) const {
        const float factor = context.params.rare.dropout.keep_factor;
#pragma unroll
        for (int i = 8 * step; i < 8 * step + 8; i += 4) {
            const float4 two = load_shared_16(statistics + i / 4 * BackwardScores<Traits>::kEightQueries);
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const uint32_t pair = weights[(i % 8 + e) / 2];
                const float low = pair & 0x8000u ? 0.0f : x[i + e] * factor;
                const float high = pair & 0x80000000u ? 0.0f : x[i + e + 1] * factor;
                x[i + e] = fabsf(low_of(pair, T())) * BackwardScores<Traits>::difference(low, two.y);
                x[i + e + 1] = fabsf(high_of(pair, T())) * BackwardScores<Traits>::difference(high, two.w);
            }
        }
    }

private:
    // The steps of apply_rare_steps(). The mask is in `bits`, and the bias is added here.
    template <class Differentiate>
    struct Steps {
        const BackwardContext<Traits>& context;
        const ChunkOrigin& origin;
        Scores& scores;
        uint32_t hidden;
        bool edge;
        int lane;
        const Differentiate& differentiate_element;

        __device__ __forceinline__ bool before_softcap() const { return true; }
        __device__ __forceinline__ float largest_exponent() const { return exponent_shift<T>() + Traits::kProbabilityShift; }
        __device__ __forceinline__ float differentiate(const GradientElement& x, float slope, bool kept) const {
            return differentiate_element(x, slope, kept);
        }
        template <class ForAll>
        __device__ __forceinline__ void scale(float softmax_scale, const ForAll& for_all) const {
            scale_and_cap_quickly(context.params.rare, softmax_scale, for_all);
        }
        __device__ __forceinline__ void apply_own(ScoreRules<T>& rules) const {
            if (rules.bias) context.params.rare.bias.is_float ? add_bias<float>(rules.bias) : add_bias<T>(rules.bias);
            rules.bias = nullptr, rules.mask = nullptr;
        }
        template <class Number>
        __device__ __forceinline__ void add_bias(const void* of_head) const {
            const auto& tiles = context.tile().tiles;
            const ScoreRows<Number> bias(context.params.rare.bias, of_head, origin.key - (lane >> 2), tiles.length_q,
                                         tiles.length_k);
            add_transposed_bias<kChunk>(scores, 1.0f, bias, origin.row - (lane & 3) * 2, lane);
        }
        __device__ __forceinline__ void hide() const {
            const auto& tiles = context.tile().tiles;
#pragma unroll
            for (int i = 0; i < kScores; ++i)
                if (hidden >> i & 1) scores[i] = -INFINITY;
            if (edge) mask_edge_transposed(tiles, origin.row, origin.key, -INFINITY, scores);
        }
    };

    template <class Differentiate>
    __device__ __forceinline__ void apply(Scores& s, Scores& dp, const ChunkOrigin& origin, const Bits& of, bool edge,
                                          const Differentiate& differentiate) const {
        const auto& tiles = context.tile().tiles;
        const auto* const statistics = reinterpret_cast<const float4*>(context.tiles.statistics(origin.stage) + origin.first +
                                                                       (static_cast<int>(threadIdx.x) & 3) * 2);
        const auto at = [&](int i) -> GradientElement {
            const float4 f = statistics[i / 4 * 4];
            return {s[i],
                    dp[i],
                    origin.row + i / 4 * 8 + i % 2,
                    origin.key + i / 2 % 2 * 8,
                    (i % 2 ? f.z : f.x) - Traits::kProbabilityShift,
                    i % 2 ? f.w : f.y};
        };
        const Steps<Differentiate> steps{context, origin, s, of.hidden, edge, static_cast<int>(threadIdx.x & 31), differentiate};
        apply_rare_steps<T, kScores>(context.params.rare, context.params.softmax_scale, tiles, tiles.length_k - tiles.length_q,
                                     origin.head, of.keep, at, steps);
    }
};

}  // namespace libflash::cuda::sm90
