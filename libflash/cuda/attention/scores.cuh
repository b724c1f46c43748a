// What the options for single scores need: ALiBi, bias, boolean mask, and the random words of dropout.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/ptx/math.cuh"

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

// Where the numbers for single scores of one (batch, head) begin.
template <class T>
struct ScoreRules {
    float slope;
    int bottom_right;  // length_k - length_q: ALiBi's distance is 0 there, however the causal rule is aligned
    const T* bias_16;
    const float* bias_32;
    const uint8_t* mask;

    __device__ __forceinline__ void init(const RareParams& rare, int batch, int head, int length_q, int length_k) {
        slope = rare.alibi_slopes.data ? head_number<T>(rare.alibi_slopes, batch, head) : 0.0f;
        bottom_right = length_k - length_q;
        const int64_t bias_start = batch * rare.bias.stride[0] + head * rare.bias.stride[1];
        bias_32 = rare.bias.data && rare.bias.is_float ? static_cast<const float*>(rare.bias.data) + bias_start : nullptr;
        bias_16 = rare.bias.data && !rare.bias.is_float ? static_cast<const T*>(rare.bias.data) + bias_start : nullptr;
        mask = rare.mask.data
                   ? static_cast<const uint8_t*>(rare.mask.data) + batch * rare.mask.stride[0] + head * rare.mask.stride[1]
                   : nullptr;
    }
};

// The rules as passes over all scores of a thread, one option after the other: each pass needs little state. for_each(rule) calls
// rule(score, row, col) for the scores whose row and key exist. Dot products become scores in natural units ...
template <class ForEach>
__device__ __forceinline__ void scale_and_cap(const RareParams& rare, float softmax_scale, const ForEach& for_each) {
    for_each([&](float& score, int, int) { score *= softmax_scale; });
    if (rare.softcap > 0.0f) {
        const float cap = rare.softcap, inverse = 1.0f / cap;
        for_each([&](float& score, int, int) { score = cap * tanh_accurate(score * inverse); });
    }
}

// ... and, after what is added to them or hides them, scores in base-2 units.
template <class T, class ForEach>
__device__ __forceinline__ void add_and_hide(const RareParams& rare, const ScoreRules<T>& rules, const ForEach& for_each) {
    if (rare.alibi_slopes.data) {
        const float slope = rules.slope;
        const int bottom_right = rules.bottom_right;
        for_each([&](float& score, int row, int col) { score -= slope * fabsf(static_cast<float>(row + bottom_right - col)); });
    }
    if (rules.bias_32) {
        const float* bias = rules.bias_32;
        for_each([&](float& score, int row, int col) { score += bias[row * rare.bias.stride[2] + col * rare.bias.stride[3]]; });
    }
    if (rules.bias_16) {
        const T* bias = rules.bias_16;
        for_each([&](float& score, int row, int col) {
            score += to_float(bias[row * rare.bias.stride[2] + col * rare.bias.stride[3]]);
        });
    }
    if (rules.mask) {
        const uint8_t* mask = rules.mask;
        for_each([&](float& score, int row, int col) {
            if (!mask[row * rare.mask.stride[2] + col * rare.mask.stride[3]]) score = -INFINITY;
        });
    }
    for_each([&](float& score, int, int) { score *= kLog2e; });
}

// Philox4x32-10 (Salmon et al., SC 2011): four words for a counter and a key.
__device__ __forceinline__ uint4 philox(uint4 counter, uint32_t key_low, uint32_t key_high) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        const uint32_t high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key_low, low1, high0 ^ counter.w ^ key_high, low0);
        key_low += 0x9E3779B9u;
        key_high += 0xBB67AE85u;
    }
    return counter;
}

// The words of columns col .. col + 1 (col even) of a row; libflash.h defines the mask.
__device__ __forceinline__ uint2 dropout_words(const DropoutParams& dropout, uint32_t batch_head, int row, int col) {
    const uint4 words =
        philox(make_uint4(static_cast<uint32_t>(col) >> 2, static_cast<uint32_t>(row), batch_head, dropout.offset_mix),
               dropout.seed_low, dropout.seed_high);
    return col & 2 ? make_uint2(words.z, words.w) : make_uint2(words.x, words.y);
}

// Whether the entry takes part.
__device__ __forceinline__ bool kept(const DropoutParams& dropout, uint32_t batch_head, int row, int col) {
    const uint2 words = dropout_words(dropout, batch_head, row, col & ~1);
    return (col & 1 ? words.y : words.x) >= dropout.threshold;
}

}  // namespace libflash::cuda
