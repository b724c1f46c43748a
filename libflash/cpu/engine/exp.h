// Exponential and tanh of vectors. tests/cpu/test_functions.cpp bounds their errors.
#pragma once

#include "cpu/engine/vector.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

template <class T>
struct ExpConstants;

// Coefficients of 2^f for f in [-1/2, 1/2]: minimax for the relative error with the constant term fixed at 1, so that 2^0 is
// exactly 1.
template <>
struct ExpConstants<float> {
    static constexpr float lowest = -160, log2e = 1.44269504088896341f;
    static constexpr int mantissa = 23, bias = 127;
    static constexpr float power[] = {
        1.0f, 0.693147214968f, 0.240226527829f, 0.0555031055101f, 0.00961769297299f, 0.00134066439024f, 0.000155946781613f};
};
template <>
struct ExpConstants<double> {
    static constexpr double lowest = -1100, log2e = 1.44269504088896340736;
    static constexpr int mantissa = 52, bias = 1023;
    static constexpr double power[] = {1.0,
                                       0.69314718055994530797,
                                       0.2402265069591007114,
                                       0.055504108664821733751,
                                       0.009618129107628561243,
                                       0.0013333558146381738154,
                                       0.00015403530393171834663,
                                       0.000015252733864845099229,
                                       1.321548700340765072e-6,
                                       1.0178047531180677829e-7,
                                       7.0548148367630282563e-9,
                                       4.4572393137403012724e-10,
                                       2.5855238444590038444e-11};
};

// v * 2^n for integer n; results below the normal range are rounded to subnormals.
template <class T>
FLASH_INLINE Vec<T> scale_by_power(Vec<T> v, Vec<T> n) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return _mm512_scalef_ps(v, n);
    else
        return _mm512_scalef_pd(v, n);
#else
    using C = ExpConstants<T>;
    using I = Vec<Integer<T> >;
    // Two factors, because each must be a normal number.
    const I whole = __builtin_convertvector(n, I), half = whole >> 1, rest = whole - half;
    return v * (Vec<T>)((half + C::bias) << C::mantissa) * (Vec<T>)((rest + C::bias) << C::mantissa);
#endif
}

// 2^x for x <= 100; 0 for -infinity, NaN for NaN.
template <class T>
FLASH_INLINE Vec<T> exp2(Vec<T> x) {
    using C = ExpConstants<T>;
    x = maximum(broadcast<T>(C::lowest), x);
    const Vec<T> n = round_to_integer<T>(x), f = x - n;
    constexpr int degree = sizeof(C::power) / sizeof(T) - 1;
    Vec<T> sum = broadcast<T>(C::power[degree]);
    FLASH_UNROLL
    for (int i = degree - 1; i >= 0; --i) sum = multiply_add(sum, f, broadcast<T>(C::power[i]));
    return scale_by_power<T>(sum, n);
}

template <class T>
FLASH_INLINE Vec<T> exp(Vec<T> x) {
    return exp2<T>(x * ExpConstants<T>::log2e);
}

// tanh(x) / x as a polynomial in x^2 for x^2 <= 0.3.
template <class T>
struct TanhConstants;
template <>
struct TanhConstants<float> {
    static constexpr float power[] = {
        1.0f, -0.33333332487f, 0.13333287934f, -0.053959058621f, 0.021779939419f, -0.0084073665456f, 0.0023902171313f};
};
template <>
struct TanhConstants<double> {
    static constexpr double power[] = {1.0,
                                       -0.33333333333333333279,
                                       0.13333333333333321631,
                                       -0.053968253968243953746,
                                       0.021869488535707371659,
                                       -0.0088632355178867658113,
                                       0.0035921278272985368552,
                                       -0.0014558319062882551927,
                                       0.0005900068686253730964,
                                       -0.00023900823492147215087,
                                       0.000096412273495664000137,
                                       -0.00003781626709177755315,
                                       0.000013047088415521981446,
                                       -2.8565672532545823416e-6};
};

template <class T>
FLASH_INLINE Vec<T> tanh(Vec<T> x) {
    using C = TanhConstants<T>;
    constexpr int degree = sizeof(C::power) / sizeof(T) - 1;
    const Vec<T> squared = x * x;
    Vec<T> near = broadcast<T>(C::power[degree]);
    FLASH_UNROLL
    for (int i = degree - 1; i >= 0; --i) near = multiply_add(near, squared, broadcast<T>(C::power[i]));
    near *= x;
    // 1 - 2 / (exp(2|x|) + 1), which rounds to 1 from |x| = 25 on.
    const Vec<T> size = magnitude(x), bounded = minimum(broadcast<T>(25), size);
    const Vec<T> far = 1 - 2 / (exp<T>(2 * bounded) + 1);
    return size < T(0.5) ? near : (x < 0 ? -far : far);
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
