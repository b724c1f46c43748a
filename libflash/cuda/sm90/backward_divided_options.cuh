// The rare options in the general instance of the sm_90a backward kernel with more than 128 channels, where the consumer
// warpgroups divide the products. The layout is that of backward_scores.cuh, for kChunk queries at a time. Up to 128 channels,
// where a warpgroup has both S and dP: backward_rare_options.cuh.
#pragma once

#include "cuda/sm90/backward_chunk_options.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardDividedOptions : BackwardChunkOptions<Traits> {
    using Base = BackwardChunkOptions<Traits>;
    using Base::context, Base::kScores;
    using typename Base::Bits, typename Base::ChunkOrigin, typename Base::Scores, typename Base::T;

    // Of kQueries queries. The whole warp calls it.
    template <int kQueries>
    __device__ __forceinline__ Bits bits(const ChunkOrigin& origin, int lane) const {
        const RareParams& rare = context.params.rare;
        Bits of;
        if (rare.dropout.active) of.keep = this->template keep_bits<kQueries>(origin, lane);
        if (rare.mask.data) of.hidden = hidden_bits<kQueries>(this->mask_rows(origin, lane), origin.row - (lane & 3) * 2, lane);
        return of;
    }

    // For consumers that divide the products, where only the other warpgroup has dP. Turns the dot products into P times
    // 2^kProbabilityShift; `weights` gets what the other warpgroup needs for dS: P times the slope of the softcap, with the sign
    // bit where dropout removes the probability (differentiate_kept()). `of`: its first bits are those of the chunk.
    __device__ __forceinline__ void apply_to_values(Scores& s, Scores& weights, const ChunkOrigin& origin, const Bits& of,
                                                    bool edge) const {
        const RareParams& rare = context.params.rare;
        const auto for_all = [&](const auto& rule) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) rule(s[i], origin.row + Base::row_of(i), origin.key + Base::key_of(i));
        };
        const bool natural = are_in_natural_units(rare, context.params.scale_log2);
        if (natural) scale_and_cap_quickly(rare, context.params.softmax_scale, for_all);
        this->for_slopes(s, [&](int i, float slope) { weights[i] = slope; });
        const ScoreRules<T> of_head = this->rules(origin);
        if (of_head.bias) this->add_bias(s, 1.0f, of_head.bias, origin);
        if (rare.alibi_slopes.data) {
            const float slope = of_head.slope;
            const int shift = of_head.alibi_shift;
            for_all([&](float& score, int row, int key) { subtract_alibi(score, slope, row + shift, key); });
        }
        this->hide(s, origin, rare.mask.data != nullptr, of.hidden, edge);
        multiply_by_probabilities(s, weights, origin, of.keep, natural ? kLog2e : context.params.scale_log2);
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
    // s becomes P, or 0 where dropout removes it; weights are multiplied by P before dropout.
    __device__ __forceinline__ void multiply_by_probabilities(Scores& s, Scores& weights, const ChunkOrigin& origin,
                                                              uint32_t keep, float unit) const {
        const auto* const statistics =
            reinterpret_cast<const float4*>(context.tiles.statistics(origin.stage) + origin.first + (Base::lane() & 3) * 2);
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const float4 two = statistics[i / 4 * 4];
            const float exponent = fmaf(s[i], unit, Traits::kProbabilityShift - (i % 2 ? two.z : two.x));
            const float p = exp2_approx(min_or_nan(exponent, exponent_shift<T>() + Traits::kProbabilityShift));
            const bool kept = keep >> i & 1;
            weights[i] = kept ? fabsf(weights[i] * p) : -fabsf(weights[i] * p);
            s[i] = kept ? p : 0.0f;
        }
    }
};

}  // namespace libflash::cuda::sm90
