// The scores of the general instance of the sm_90a backward kernel up to 128 channels, with the rare options: from dot products
// to P and dS. The layout is that of backward_scores.cuh, for kChunk queries at a time.
#pragma once

#include "cuda/sm90/backward_chunk_options.cuh"

namespace libflash::cuda::sm90 {

// What a call reads or generates for each score. A template parameter, because registers and branches for an absent input would
// slow down the rest.
enum class ScoreInputs {
    none,     // no mask and no bias; without kOwnDropout perhaps dropout
    dropout,  // with kOwnDropout
    mask,     // and perhaps dropout
    bias,     // and perhaps a mask or dropout
};

template <class Traits>
struct BackwardRareOptions : BackwardChunkOptions<Traits> {
    using Base = BackwardChunkOptions<Traits>;
    using Base::context, Base::kScores;
    using typename Base::Bits, typename Base::ChunkOrigin, typename Base::Scores, typename Base::T;
    // Whether calls with dropout, but without bias and mask, have code of their own. With 128 channels it would spill registers.
    static constexpr bool kOwnDropout = Traits::kHeadDim <= 96;

    __device__ __forceinline__ ScoreInputs inputs() const {
        const RareParams& rare = context.params.rare;
        if (rare.bias.data) return ScoreInputs::bias;
        if (rare.mask.data) return ScoreInputs::mask;
        return kOwnDropout && rare.dropout.active ? ScoreInputs::dropout : ScoreInputs::none;
    }

    // What load() has loaded of a chunk.
    struct Loaded {
        TransposedMask<Traits::kChunk> mask;
        bool bias_is_loaded;  // else apply() loads it: it is float32 or its strides do not allow pairs
        TransposedBias<Traits::kChunk, T> bias;
    };
    // Loads the mask or the bias. With both, the mask is loaded by bits(), because there are too few registers.
    template <ScoreInputs kInputs>
    __device__ __forceinline__ Loaded load(const ChunkOrigin& origin, int lane) const {
        Loaded loaded;
        loaded.bias_is_loaded = false;
        const int row = origin.row - (lane & 3) * 2;
        if constexpr (kInputs == ScoreInputs::mask) load_mask(loaded.mask, origin, lane);
        if constexpr (kInputs == ScoreInputs::bias) {
            const ScoreParams& bias = context.params.rare.bias;
            if (!bias.is_float) {
                const ScoreRows<T> rows = this->template rows_of<T>(bias, this->rules(origin).bias, origin, lane);
                loaded.bias_is_loaded = loaded.bias.loads(rows);
                if (loaded.bias_is_loaded) loaded.bias.load(rows, row, lane);
            }
        }
        return loaded;
    }
    template <ScoreInputs kInputs>
    __device__ __forceinline__ Bits bits(const ChunkOrigin& origin, const Loaded& loaded, int lane) const {
        Bits of;
        if (has_dropout<kInputs>()) of.keep = this->template keep_bits<Traits::kChunk>(origin, lane);
        if constexpr (kInputs == ScoreInputs::mask) of.hidden = loaded.mask.hidden(lane);
        if (kInputs == ScoreInputs::bias && has_mask<kInputs>()) {
            TransposedMask<Traits::kChunk> mask;
            load_mask(mask, origin, lane);
            of.hidden = mask.hidden(lane);
        }
        return of;
    }

    // Turns the dot products s and dp into P and dS, both times 2^exponent_shift(), P without the keep factor of dropout. The
    // options are applied one after another, because each pass over the scores needs few registers.
    template <ScoreInputs kInputs>
    __device__ __forceinline__ void apply(Scores& s, Scores& dp, const ChunkOrigin& origin, const Bits& of, Loaded& loaded,
                                          bool edge) const {
        const RareParams& rare = context.params.rare;
        // The condition selects an operand: with a condition on the fma the compiler loads the factor again for each element.
        const auto kept_term = [&](int i, float delta) {
            return fmaf(of.keep >> i & 1 ? dp[i] : 0.0f, rare.dropout.keep_factor, -delta);
        };
        const bool capped = rare.softcap > 0.0f, drops = has_dropout<kInputs>();
        const bool scales = scales_with_bias<Traits::kHeadDim>(rare);
        if (in_natural_units() && !scales) scale_and_cap(s);
        if (capped) {
            if (drops) {
                for_elements(origin, [&](int i, float, float delta) { dp[i] = kept_term(i, delta); });
            } else {
                for_elements(origin, [&](int i, float, float delta) { dp[i] -= delta; });
            }
            this->for_slopes(s, [&](int i, float slope) { dp[i] *= slope; });
        }
        add_and_hide<kInputs>(s, scales ? context.params.softmax_scale : 1.0f, origin, of.hidden, loaded, edge);
        if (capped) {
            multiply_by_probabilities(s, dp, origin, of.keep, [&](int i, float) { return dp[i]; });
        } else if (drops) {
            multiply_by_probabilities(s, dp, origin, of.keep, kept_term);
        } else {
            multiply_by_probabilities(s, dp, origin, ~0u, [&](int i, float delta) { return dp[i] - delta; });
        }
    }

private:
    __device__ __forceinline__ void load_mask(TransposedMask<Traits::kChunk>& mask, const ChunkOrigin& origin, int lane) const {
        mask.load(this->mask_rows(origin, lane), origin.row - (lane & 3) * 2, lane);
    }
    // Whether the scores are multiplied by softmax_scale before other options. Otherwise P is computed from the dot products.
    __device__ __forceinline__ bool in_natural_units() const {
        return are_in_natural_units(context.params.rare, context.params.scale_log2);
    }
    __device__ __forceinline__ void scale_and_cap(Scores& s) const {
        scale_and_cap_quickly(context.params.rare, context.params.softmax_scale, [&](const auto& rule) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) rule(s[i], 0, 0);
        });
    }
    // ALiBi, bias and masks. The addition of the bias multiplies the scores by `factor`.
    template <ScoreInputs kInputs>
    __device__ __forceinline__ void add_and_hide(Scores& s, float factor, const ChunkOrigin& origin, uint32_t hidden,
                                                 Loaded& loaded, bool edge) const {
        const RareParams& rare = context.params.rare;
        if (rare.alibi_slopes.data) subtract_alibi(s, origin);
        if constexpr (kInputs == ScoreInputs::bias) {
            if (loaded.bias_is_loaded) {
                loaded.bias.add(s, factor);
            } else {
                this->template add_bias<false>(s, factor, this->rules(origin).bias, origin);
            }
        }
        this->hide(s, origin, has_mask<kInputs>(), hidden, edge);
    }
    template <ScoreInputs kInputs>
    __device__ __forceinline__ bool has_mask() const {
        return kInputs == ScoreInputs::mask || (kInputs == ScoreInputs::bias && context.params.rare.mask.data);
    }
    template <ScoreInputs kInputs>
    __device__ __forceinline__ bool has_dropout() const {
        if (kInputs == ScoreInputs::dropout) return true;
        return !(kOwnDropout && kInputs == ScoreInputs::none) && context.params.rare.dropout.active;
    }
    // Calls rule(i, lse_log2, delta) for all elements, with the statistics of their rows.
    template <class Rule>
    __device__ __forceinline__ void for_elements(const ChunkOrigin& origin, const Rule& rule) const {
        const uint32_t statistics =
            shared_address(context.tiles.statistics(origin.stage) + origin.first + (Base::lane() & 3) * 2);
#pragma unroll
        for (int i = 0; i < kScores; i += 4) {
            const float4 two = load_shared_16(statistics + i / 4 * BackwardScores<Traits>::kEightQueries);
#pragma unroll
            for (int e = 0; e < 4; ++e) rule(i + e, e % 2 ? two.z : two.x, e % 2 ? two.w : two.y);
        }
    }
    // As cuda::subtract_alibi(); below 2^24 the distances are exact.
    __device__ __forceinline__ void subtract_alibi(Scores& s, const ChunkOrigin& origin) const {
        const ScoreRules<T> of_head = this->rules(origin);
        const float distance = static_cast<float>(origin.row + of_head.alibi_shift - origin.key);
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            s[i] = fmaf(-of_head.slope, fabsf(distance + static_cast<float>(Base::row_of(i) - Base::key_of(i))), s[i]);
    }
    // x[i] = p term(i, delta), and s[i] = p, or 0 where dropout removes it, with p = exp(score - LSE) * 2^exponent_shift(). The
    // epilogue multiplies dV by the keep factor and by 2^-exponent_shift().
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
};

}  // namespace libflash::cuda::sm90
