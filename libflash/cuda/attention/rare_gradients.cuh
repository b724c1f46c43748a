// Backward with the rare options: the operations on the transposed scores of a thread between the products.
//
//   p = exp(score - lse)      ds = p (keep dp / (1 - p_drop) - delta)      both times 2^exponent_shift()
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/ptx/math.cuh"

namespace libflash::cuda {

// One element: the dot products of its query with the key and of dO with the value; its row and key; the
// statistics of its query row.
struct GradientElement {
    float &s, &dp;
    int row, key;
    float lse_log2, delta;
};

// The steps that differ between callers of apply_rare_options(): those of dS from dP and delta. mask_edge() sets the scores that
// the mask hides to -infinity. wanted_before_softcap: false for dS after the softcap.
template <class T, class MaskEdge>
struct GradientSteps {
    const RareParams& rare;
    const MaskEdge& mask_edge;
    bool wanted_before_softcap;

    __device__ __forceinline__ bool before_softcap() const { return wanted_before_softcap; }
    // The largest exponent of p.
    __device__ __forceinline__ float largest_exponent() const { return exponent_shift<T>(); }
    // What p is multiplied by. slope: of the softcap; kept: whether dropout keeps p.
    __device__ __forceinline__ float differentiate(const GradientElement& x, float slope, bool kept) const {
        return ((kept ? x.dp * rare.dropout.keep_factor : 0.0f) - x.delta) * slope;
    }
    // Turns dot products into scores in natural units.
    template <class ForAll>
    __device__ __forceinline__ void scale(float softmax_scale, const ForAll& for_all) const {
        scale_and_cap(rare, softmax_scale, for_all);
    }
    // Applies options in its own way to the scores in natural units, and removes them from the rules.
    __device__ __forceinline__ void apply_own(ScoreRules<T>&) const {}
    // Hides base-2 scores.
    __device__ __forceinline__ void hide() const { mask_edge(); }
};

// Turns the dot product s into p, and dp into p times steps.differentiate(). at(i) gives element i of kCount; bit i of `keep`
// says whether dropout keeps it. `tiles`: a QueryTiles. alibi_shift: the key at distance 0 of row 0. Each step updates dp as soon
// as its factor is known, so that no other values need registers. `steps`: has the members of GradientSteps.
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

// Turns the dot products s and dp into p and dS.
template <class T, int kCount, class Tiles, class ElementAt, class MaskEdge>
__device__ __forceinline__ void apply_rare_options(const RareParams& rare, float softmax_scale, const Tiles& tiles,
                                                   int alibi_shift, int head, uint32_t keep, const ElementAt& at,
                                                   const MaskEdge& mask_edge, bool before_softcap = true) {
    const GradientSteps<T, MaskEdge> steps{rare, mask_edge, before_softcap};
    apply_rare_steps<T, kCount>(rare, softmax_scale, tiles, alibi_shift, head, keep, at, steps);
}

}  // namespace libflash::cuda
