// The rare options that change single scores: softcap, ALiBi, bias, boolean mask.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/ptx/math.cuh"

#include <type_traits>

namespace libflash::cuda {

template <class T>
__device__ __forceinline__ float load_number(const void* data, int64_t index, bool is_float) {
    return is_float ? static_cast<const float*>(data)[index] : to_float(static_cast<const T*>(data)[index]);
}

template <class T>
__device__ __forceinline__ void store_number(void* data, int64_t index, bool is_float, float x) {
    if (is_float) {
        static_cast<float*>(data)[index] = x;
    } else {
        static_cast<T*>(data)[index] = from_float(x, T());
    }
}

template <class T>
__device__ __forceinline__ float head_number(const HeadParams& numbers, int batch, int head) {
    return load_number<T>(numbers.data, batch * numbers.batch_stride + head * numbers.head_stride, numbers.is_float);
}

// Backward computes with probabilities times 2^exponent_shift(): a probability below the smallest normal number would be
// flushed to zero, though its product with dP may be large. `half` has too small a range for the shift and does not need it: for
// `half` such a product is below the smallest number. With the shift the exponent is a larger float and loses low bits: 3 bits
// with a shift of 8; 5 bits with a shift of 32, which bf16 can spare.
template <class T>
__device__ constexpr float exponent_shift() {
    return std::is_same<T, __half>::value ? 0.0f : (std::is_same<T, float>::value ? 8.0f : 32.0f);
}
template <class T>
__device__ constexpr float undo_exponent_shift() {  // 2^-exponent_shift()
    return std::is_same<T, __half>::value ? 1.0f : (std::is_same<T, float>::value ? 0.00390625f : 2.3283064365386963e-10f);
}

// The option data of one (batch, head).
template <class T>
struct ScoreRules {
    float slope;
    int alibi_shift;   // the key where ALiBi's distance from row 0 is 0: length_k - length_q, whatever the mask's alignment
    const void* bias;  // or nullptr
    const uint8_t* mask;

    __device__ __forceinline__ void init(const RareParams& rare, int batch, int head, int shift) {
        slope = rare.alibi_slopes.data ? head_number<T>(rare.alibi_slopes, batch, head) : 0.0f;
        alibi_shift = shift;
        const int64_t bias_start = batch * rare.bias.stride[0] + head * rare.bias.stride[1];
        bias = rare.bias.data
                   ? static_cast<const char*>(rare.bias.data) + bias_start * (rare.bias.is_float ? sizeof(float) : sizeof(T))
                   : nullptr;
        mask = rare.mask.data
                   ? static_cast<const uint8_t*>(rare.mask.data) + batch * rare.mask.stride[0] + head * rare.mask.stride[1]
                   : nullptr;
    }
};

// Whether the kernels of sm90 multiply the dot products by softmax_scale before they apply other options. If not, their softmax
// multiplies by it.
__device__ __forceinline__ bool are_in_natural_units(const RareParams& rare, float scale_log2) {
    return rare.softcap > 0.0f || rare.alibi_slopes.data || rare.bias.data || !(scale_log2 > 0.0f);
}
// Whether one fma scales a score and adds the bias: without softcap and ALiBi, which come between the two steps. With more than
// 128 channels there are too few registers. Forward and backward round alike, so that backward's scores are those of the LSE.
template <int kHeadDim>
__device__ __forceinline__ bool scales_with_bias(const RareParams& rare) {
    return kHeadDim <= 128 && rare.bias.data && !(rare.softcap > 0.0f) && !rare.alibi_slopes.data;
}

// The options are applied in passes over all scores of a thread, one option after another, because each pass needs few registers.
// for_all(rule) calls rule(score, row, col) for every score; for_each calls it only for scores whose row and key exist, and only
// these passes read memory.
//
// Turns dot products into scores in natural units.
template <class ForAll>
__device__ __forceinline__ void scale_and_cap(const RareParams& rare, float softmax_scale, const ForAll& for_all) {
    if (rare.softcap > 0.0f) {
        const float cap = rare.softcap, inverse = softmax_scale / cap;
        for_all([&](float& score, int, int) { score = cap * tanh_accurate(score * inverse); });
    } else {
        for_all([&](float& score, int, int) { score *= softmax_scale; });
    }
}
// As scale_and_cap(), in base-2 units, for kernels without bias. It is a separate function because the constants round
// differently.
// `params`: with softcap, softmax_scale and scale_log2.
template <class Params, class ForAll>
__device__ __forceinline__ void scale_and_cap_log2(const Params& params, const ForAll& for_all) {
    if (params.softcap > 0.0f) {
        const float inverse = params.softmax_scale / params.softcap, cap = params.softcap * kLog2e;
        for_all([&](float& score, int, int) { score = cap * tanh_accurate(score * inverse); });
    } else {
        for_all([&](float& score, int, int) { score *= params.scale_log2; });
    }
}

// ALiBi. `position`: the key on the diagonal of the query row, where the distance is 0. One rounding, so that every kernel has
// the same bits: for invariant rows the compiler must not choose which products it fuses.
__device__ __forceinline__ void subtract_alibi(float& score, float slope, int position, int key) {
    score = fmaf(-slope, fabsf(static_cast<float>(position - key)), score);
}

// Adds ALiBi and bias, applies the boolean mask, and converts the scores to base-2 units.
template <class T, class ForAll, class ForEach>
__device__ __forceinline__ void add_and_hide(const RareParams& rare, const ScoreRules<T>& rules, const ForAll& for_all,
                                             const ForEach& for_each) {
    if (rare.alibi_slopes.data) {
        const float slope = rules.slope;
        const int alibi_shift = rules.alibi_shift;
        for_all([&](float& score, int row, int col) { subtract_alibi(score, slope, row + alibi_shift, col); });
    }
    const auto at = [](const ScoreParams& tensor, int row, int col) { return row * tensor.stride[2] + col * tensor.stride[3]; };
    if (rules.bias && rare.bias.is_float) {
        const float* bias = static_cast<const float*>(rules.bias);
        for_each([&](float& score, int row, int col) { score += bias[at(rare.bias, row, col)]; });
    } else if (rules.bias) {
        const T* bias = static_cast<const T*>(rules.bias);
        for_each([&](float& score, int row, int col) { score += to_float(bias[at(rare.bias, row, col)]); });
    }
    if (rules.mask) {
        const uint8_t* mask = rules.mask;
        for_each([&](float& score, int row, int col) {
            if (!mask[at(rare.mask, row, col)]) score = -INFINITY;
        });
    }
    for_all([&](float& score, int, int) { score *= kLog2e; });
}

}  // namespace libflash::cuda
