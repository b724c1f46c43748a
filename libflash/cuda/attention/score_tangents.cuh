// Applies the score options to scores and their tangents.
//
//   s = cap tanh(z / cap) - alibi + bias      ts = (1 - tanh(z / cap)^2) tz + tbias      z = scale q.k, tz = scale (tq.k + q.tk)
#pragma once

#include "cuda/attention/scores.cuh"

namespace libflash::cuda {

// The tangent of the bias of one (batch, head).
struct BiasTangent {
    const void* data;  // or nullptr

    template <class T>
    __device__ __forceinline__ void init(const ScoreParams& tbias, int batch, int head) {
        const int64_t start = batch * tbias.stride[0] + head * tbias.stride[1];
        const int64_t bytes = start * static_cast<int64_t>(tbias.is_float ? sizeof(float) : sizeof(T));
        data = tbias.data ? static_cast<const char*>(tbias.data) + bytes : nullptr;
    }

    // for_pairs as in apply_rules_to_both().
    template <class T, class ForPairs>
    __device__ __forceinline__ void add(const ScoreParams& tbias, int rows, int cols, const ForPairs& for_pairs) const {
        if (!data) return;
        for_pairs([&](float&, float& ts, int row, int col) {
            if (row < rows && col < cols)
                ts += load_number<T>(data, row * tbias.stride[2] + col * tbias.stride[3], tbias.is_float);
        });
    }
};

// Turns the dot products s = q.k and ts = tq.k + q.tk into scores in base-2 units and tangents in natural units. for_pairs(rule)
// calls rule(s, ts, row, col) for all elements of a thread; only those with row < rows and col < cols exist. Masked scores become
// -infinity; their tangents may have any value.
template <class T, class ForPairs>
__device__ __forceinline__ void apply_rules_to_both(const RareParams& rare, const ScoreRules<T>& rules, const ScoreParams& tbias,
                                                    const BiasTangent& bias_tangent, float softmax_scale, int rows, int cols,
                                                    const ForPairs& for_pairs) {
    const auto for_all = [&](const auto& rule) { for_pairs([&](float& s, float&, int row, int col) { rule(s, row, col); }); };
    const auto for_each = [&](const auto& rule) {
        for_pairs([&](float& s, float&, int row, int col) {
            if (row < rows && col < cols) rule(s, row, col);
        });
    };
    scale_and_cap(rare, softmax_scale, for_all);
    const float inverse = rare.softcap > 0.0f ? 1.0f / rare.softcap : 0.0f;
    for_pairs([&](float& s, float& ts, int, int) {
        const float capped = s * inverse;
        ts *= softmax_scale * fmaf(-capped, capped, 1.0f);
    });
    bias_tangent.add<T>(tbias, rows, cols, for_pairs);
    add_and_hide<T>(rare, rules, for_all, for_each);
}

}  // namespace libflash::cuda
