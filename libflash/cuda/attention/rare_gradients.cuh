// Backward with the rare options: the operations on the scores of a thread between the products.
//
//   p = exp(score - lse)      ds = p (keep dp / (1 - p_drop) - delta)      both times 2^exponent_shift()
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/ptx/math.cuh"

namespace libflash::cuda {

// One element: the dot products of its query with the key and of dO with the value; its row and key; the statistics of its query
// row.
struct GradientElement {
    float &s, &dp;
    int row, key;
    float lse_log2, delta;
};

// Turns the dot product s into p, and dp into dS: the gradient of the scaled dot product before the softcap, or after it with
// before_softcap = false. at(i) gives element i of kCount; bit i of `keep` says whether dropout keeps it; mask_edge() sets the
// scores that the mask hides to -infinity. `tiles`: a QueryTiles. alibi_shift: the key at distance 0 of row 0. Each step updates
// dp as soon as its factor is known, so that no other values need registers.
template <class T, int kCount, class Tiles, class ElementAt, class MaskEdge>
__device__ __forceinline__ void apply_rare_options(const RareParams& rare, float softmax_scale, const Tiles& tiles,
                                                   int alibi_shift, int head, uint32_t keep, const ElementAt& at,
                                                   const MaskEdge& mask_edge, bool before_softcap = true) {
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
    scale_and_cap(rare, softmax_scale, for_all);
    const float inverse = before_softcap && rare.softcap > 0.0f ? 1.0f / rare.softcap : 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const GradientElement x = at(i);
        const float capped = x.s * inverse, slope = fmaf(-capped, capped, 1.0f);
        x.dp = ((keep >> i & 1 ? x.dp * rare.dropout.keep_factor : 0.0f) - x.delta) * slope;
    }
    ScoreRules<T> rules;
    rules.init(rare, tiles.batch, head, alibi_shift);
    add_and_hide<T>(rare, rules, for_all, for_each);
    mask_edge();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const GradientElement x = at(i);
        x.s = exp2_approx(min_or_nan(x.s - x.lse_log2, exponent_shift<T>()));
        x.dp *= x.s;
        if (!(keep >> i & 1)) x.s = 0.0f;
    }
}

}  // namespace libflash::cuda
