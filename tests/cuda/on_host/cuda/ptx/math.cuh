// Replaces the library's header.
#pragma once

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "emulation.h"

namespace libflash::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

inline float exp2_approx(float x) {
    const float y = static_cast<float>(std::exp2(static_cast<double>(x)));
    return y < 1.17549435e-38f ? 0.0f : y;
}
inline void add_scaled_and_clear(float& sum, float& x, float of_sum, float of_x, float zero) {
    sum = std::fmaf(x, of_x, sum * of_sum);
    x = zero;
}
inline void add_scaled_to_last(float& sum, float& x, float of_sum, float of_x) {
    add_scaled_and_clear(sum, x, of_sum, of_x, 0.0f);
    std::swap(sum, x);
}
inline float min_or_nan(float x, float y) { return std::isnan(x) || std::isnan(y) ? NAN : min(x, y); }
inline float max_or_nan(float x, float y) { return std::isnan(x) || std::isnan(y) ? NAN : max(x, y); }
inline float tanh_accurate(float x) { return std::tanh(x); }

inline __nv_bfloat16 from_float(float x, __nv_bfloat16) { return __float2bfloat16_rn(x); }
inline float from_float(float x, float) { return x; }
inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
// The conversions of CUDA's headers take a tenth of a program's time.
#ifdef __F16C__
inline __half from_float(float x, __half) {
    return std::isnan(x) ? __half_raw{0x7fff} : __half_raw{static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
}
inline float to_float(__half x) { return _cvtsh_ss(static_cast<__half_raw>(x).x); }
#else
inline __half from_float(float x, __half) { return __float2half_rn(x); }
inline const std::vector<float> values_of_half = [] {
    std::vector<float> made(1 << 16);
    for (unsigned bits = 0; bits < made.size(); ++bits) made[bits] = __half2float(__half_raw{static_cast<uint16_t>(bits)});
    return made;
}();
inline float to_float(__half x) { return values_of_half[static_cast<__half_raw>(x).x]; }
#endif
inline float to_float(float x) { return x; }

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

template <class T>
uint32_t pack_pair(float low, float high, T) {
    const T both[2] = {from_float(low, T()), from_float(high, T())};
    uint32_t pair;
    std::memcpy(&pair, both, 4);
    return pair;
}

template <class T>
float low_of(uint32_t pair, T) {
    T both[2];
    std::memcpy(both, &pair, 4);
    return to_float(both[0]);
}
template <class T>
float high_of(uint32_t pair, T) {
    return low_of(pair >> 16, T());
}

template <class T>
void trace_pair(uint32_t& trace, uint32_t pair, T) {
    T both[2];
    std::memcpy(both, &pair, 4);
    for (int i = 0; i < 2; ++i)
        if (!std::isfinite(to_float(both[i]))) trace |= 0x7fffu << 16 * i;
}

}  // namespace libflash::cuda
