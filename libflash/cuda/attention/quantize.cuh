// One warp converts a new row to the codes of an 8-bit KV cache: it divides by the scale, rounds to nearest even, and saturates.
// If each row has its own scale, the warp computes and writes it. The codes have the same bits as on the CPU (cpu/quantize.h).
#pragma once

#include "cuda/attention/cache_params.h"
#include "cuda/attention/rotary.cuh"

namespace libflash::cuda {

// As to_float(), but a NaN keeps its bits.
template <class T>
__device__ __forceinline__ float widen(T value) {
    return to_float(value);
}
__device__ __forceinline__ float widen(__half value) {
    const uint32_t bits = __half_as_ushort(value);
    if ((bits & 0x7fff) <= 0x7c00) return to_float(value);
    return __uint_as_float((bits & 0x8000) << 16 | 0x7f800000 | (bits & 0x3ff) << 13);
}

__device__ __forceinline__ float largest_code(CodeType type) {
    return type == CodeType::e4m3 ? 448.0f : type == CodeType::e5m2 ? 57344.0f : 127.0f;
}

// Rounds to nearest even to `kMantissa` bits. `magnitude`: finite, at most the largest code. Subnormal codes are multiples of the
// smallest code; a carry out of the fraction gives the next exponent.
template <int kMantissa, int kBias>
__device__ __forceinline__ uint32_t float_code(float magnitude) {
    constexpr int kDropped = 23 - kMantissa;
    const uint32_t bits = __float_as_uint(magnitude), exponent = bits >> 23;
    if (exponent < 128 - kBias) {
        const float steps = magnitude * __uint_as_float(static_cast<uint32_t>(126 + kBias + kMantissa) << 23);
        return static_cast<uint32_t>(rintf(steps));
    }
    const uint32_t rounded = bits + ((1u << (kDropped - 1)) - 1) + (bits >> kDropped & 1);
    return (rounded >> kDropped) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
}

__device__ __forceinline__ uint8_t code_of(float value, CodeType type) {
    const uint32_t bits = __float_as_uint(value), sign = bits >> 24 & 0x80;
    const bool nan = value != value;
    const float magnitude = min(fabsf(value), largest_code(type));
    switch (type) {
        case CodeType::e4m3: return static_cast<uint8_t>(nan ? 0x7f : sign | float_code<3, 7>(magnitude));
        case CodeType::e5m2: return static_cast<uint8_t>(sign | (nan ? 0x7e | (bits >> 21 & 3) : float_code<2, 15>(magnitude)));
        default: {
            const int whole = nan ? 0 : static_cast<int>(rintf(magnitude));
            return static_cast<uint8_t>(sign ? -whole : whole);
        }
    }
}

// Zero stays zero for any scale. A NaN keeps its bits. Infinity / infinity gives a negative NaN, as on x86.
__device__ __forceinline__ float quotient(float value, float scale) {
    if (value == 0.0f || value != value) return value;
    if (scale != scale) return scale;
    const float result = value / scale;
    return result != result ? __uint_as_float(0xffc00000u) : result;
}

// The bits of the magnitude of a value; bits have the order of magnitudes, NaN is the largest. A NaN counts only for int8, which
// has no code for NaN: the scale is then NaN.
template <class T>
__device__ __forceinline__ uint32_t magnitude_bits(T x, CodeType type) {
    const float value = widen(x);
    return value == value || type == CodeType::int8 ? __float_as_uint(value) & 0x7fffffffu : 0;
}
// The scale that maps the largest magnitude to the largest code.
__device__ __forceinline__ float scale_of_magnitude(uint32_t largest, CodeType type) {
    const float magnitude = __uint_as_float(largest);
    return magnitude != magnitude ? magnitude : magnitude / largest_code(type);
}
template <class Row>
__device__ __forceinline__ float scale_for(const Row& row, int first, int count, CodeType type, int lane) {
    uint32_t largest = 0;
    for (int c = first + lane; c < first + count; c += 32) largest = max(largest, magnitude_bits(row.at(c), type));
    for (int step = 16; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    return scale_of_magnitude(largest, type);
}

// Writes a row of one head to the cache. `to`: the row's first element in a cache of T or of codes. `scales`: the scale of the
// first group, or nullptr without scales. All lanes of a warp call it.
template <class T, class Rotary>
__device__ __forceinline__ void write_cached_row(const NewCacheRow<T, Rotary>& row, int channels, const CacheScaleParams& scale,
                                                 float* scales, CodeType type, void* to, int lane) {
    if (type == CodeType::none && !scales) {
        for (int c = lane; c < channels; c += 32) static_cast<T*>(to)[c] = row.at(c);
        return;
    }
    const int groups = scales ? scale.groups : 1, size = channels / groups;
    for (int group = 0; group < groups; ++group) {
        const int first = group * size;
        float factor = 1.0f;
        if (scales) {
            float* const at = scales + group * scale.group;
            factor = scale.of_rows ? scale_for(row, first, size, type, lane) : *at;
            if (scale.of_rows && lane == 0) *at = factor;
        }
        for (int c = first + lane; c < first + size; c += 32) {
            const float value = quotient(widen(row.at(c)), factor);
            if (type == CodeType::none) {
                static_cast<T*>(to)[c] = from_float(value, T());
            } else {
                static_cast<uint8_t*>(to)[c] = code_of(value, type);
            }
        }
    }
}

// The address of an element of a cache; `offset` in elements.
template <class T>
__device__ __forceinline__ void* cached_address(void* data, int64_t offset, CodeType type) {
    return static_cast<char*>(data) + offset * static_cast<int64_t>(type == CodeType::none ? sizeof(T) : 1);
}

__device__ __forceinline__ float* scale_address(const CacheScaleParams& scale, int64_t batch, int64_t block, int64_t row,
                                                int64_t head) {
    if (!scale.data) return nullptr;
    return scale.data + batch * scale.batch + block * scale.block + row * scale.row + head * scale.head;
}

}  // namespace libflash::cuda
