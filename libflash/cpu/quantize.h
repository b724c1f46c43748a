// Conversion of a new row to the type of a KV cache: values are divided by the scale, rounded to nearest, ties to even, and
// limited to the largest finite code. If every row has scales of its own, they are computed and written here.
#pragma once

#include <type_traits>

#include "cpu/convert.h"
#include "problem/cache_scale.h"

namespace libflash::cpu {
namespace {

// Zero stays zero whatever the scale is.
template <class W>
W quotient(W value, float scale) {
    return value == 0 ? value : value / static_cast<W>(scale);
}

// The scale that maps the largest magnitude to the largest code. A NaN counts only for int8, which has no code for it: the scale
// is then NaN.
template <class C, class T>
float scale_for(const T* from, int64_t channels) {
    float largest = 0;
    for (int64_t c = 0; c < channels; ++c) {
        const float value = static_cast<float>(widen(from[c])), magnitude = value < 0 ? -value : value;
        if (magnitude > largest) largest = magnitude;
        if (std::is_same_v<C, int8> && value != value) return value;
    }
    return largest / kLargestCode<C>;
}

// Writes a row of `channels` values. `scales`: address of the scale of the first channel group, or nullptr without scales.
template <class T, class C>
void write_cached(const T* from, int64_t channels, const CacheScale& scale, float* scales, C* to) {
    if (std::is_same_v<T, C> && !scales) {
        for (int64_t c = 0; c < channels; ++c) std::memcpy(to + c, from + c, sizeof(C));
        return;
    }
    const int64_t size = channels / scale.groups;
    for (int64_t group = 0; group < scale.groups; ++group) {
        const int64_t first = group * size;
        float factor = 1;
        if (scales) {
            float& at = scales[group * scale.group_stride];
            if (scale.of_rows) at = scale_for<C>(from + first, size);
            factor = at;
        }
        for (int64_t c = first; c < first + size; ++c) store(to[c], static_cast<double>(quotient(widen(from[c]), factor)));
    }
}

}  // namespace
}  // namespace libflash::cpu
