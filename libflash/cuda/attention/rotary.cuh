// The rotary embedding in double, as on the CPU, so that both write the same bits to a cache.
#pragma once

#include "cuda/attention/cache_params.h"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/math.cuh"

namespace libflash::cuda {

// Rounds only once: round-to-odd to float, then to nearest in the 16-bit type, which avoids double rounding.
template <class T>
__device__ __forceinline__ T round_once(double x) {
    if constexpr (sizeof(T) == 4) {
        return static_cast<float>(x);
    } else {
        const float toward_zero = __double2float_rz(x);
        const uint32_t inexact = static_cast<double>(toward_zero) != x;
        return from_float(__uint_as_float(__float_as_uint(toward_zero) | inexact), T());
    }
}

// A new row, whose first channels are rotated. Without a rotary embedding its bits are unchanged. Rotary: RotaryParams or
// AppendParams.
template <class T, class Rotary = RotaryParams>
struct NewCacheRow {
    const T* from;
    const Rotary* rotary;  // nullptr: none
    int position;

    __device__ __forceinline__ T at(int channel) const {
        if (!rotary || channel >= 2 * rotary->pairs) return from[channel];
        const Rotary& p = *rotary;
        const int pair = p.interleaved ? channel / 2 : channel % p.pairs;
        const bool second = p.interleaved ? channel % 2 == 1 : channel >= p.pairs;
        const int64_t row = max(0, min(position, p.positions - 1));  // the table ends there
        const double c = load_number<T>(p.cos, row * p.cos_row + pair, p.is_float),
                     s = load_number<T>(p.sin, row * p.sin_row + pair, p.is_float),
                     x = to_float(from[p.interleaved ? 2 * pair : pair]),
                     y = to_float(from[p.interleaved ? 2 * pair + 1 : pair + p.pairs]);
        return round_once<T>(second ? x * s + y * c : x * c - y * s);
    }
};

}  // namespace libflash::cuda
