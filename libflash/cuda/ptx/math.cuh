// Arithmetic: base-2 exponential, tanh, minimum and maximum that propagate NaN, and conversions between float and the 16-bit
// types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace libflash::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// 2^x; results below 2^-126 are 0. Relative error at most 2^-22 (PTX ISA). Without .ftz it costs three more instructions.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// sum = sum * of_sum + x * of_x, where the first product is rounded before the addition; then x = zero. `sum` and `x` stay in
// their registers, as accumulators of wgmma must. From plain C++ the compiler would make copies of them, and because of the
// copies it would wait after each wgmma.
__device__ __forceinline__ void add_scaled_and_clear(float& sum, float& x, float of_sum, float of_x, float zero) {
    asm volatile(
        "{\n"
        ".reg .f32 product;\n"
        "mul.rn.f32 product, %0, %2;\n"
        "fma.rn.f32 %0, %1, %3, product;\n"
        "mov.f32 %1, %4;\n"
        "}"
        : "+f"(sum), "+f"(x)
        : "f"(of_sum), "f"(of_x), "f"(zero));
}
// The same, but the result goes to `x`, and then sum = 0.
__device__ __forceinline__ void add_scaled_to_last(float& sum, float& x, float of_sum, float of_x) {
    asm volatile(
        "{\n"
        ".reg .f32 product;\n"
        "mul.rn.f32 product, %0, %2;\n"
        "fma.rn.f32 %1, %1, %3, product;\n"
        "mov.f32 %0, 0f00000000;\n"
        "}"
        : "+f"(sum), "+f"(x)
        : "f"(of_sum), "f"(of_x));
}

// The smaller one, or NaN if either is.
__device__ __forceinline__ float min_or_nan(float x, float y) {
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// The larger one, or NaN if either is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// tanh with a relative error of about 2^-22: a polynomial near 0, where 1 - decay would cancel, and an exponential elsewhere.
// Branch-free.
__device__ __forceinline__ float tanh_accurate(float x) {
    const float square = x * x;
    float series = 0.021869488536f;                   // 62 / 2835
    series = fmaf(series, square, -0.053968253968f);  // -17 / 315
    series = fmaf(series, square, 0.133333333333f);   // 2 / 15
    series = fmaf(series, square, -0.333333333333f);
    const float near_zero = fmaf(x * square, series, x);
    const float decay = exp2_approx(-2.8853900817779268f * fabsf(x));
    const float far = copysignf(__fdividef(1.0f - decay, 1.0f + decay), x);
    return fabsf(x) < 0.25f ? near_zero : far;
}

// Rounds to nearest even; `low` goes to the low half.
__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __half) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The low and the high number of a pair.
__device__ __forceinline__ float low_of(uint32_t pair, __nv_bfloat16) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair, __nv_bfloat16) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float low_of(uint32_t pair, __half) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
}
__device__ __forceinline__ float high_of(uint32_t pair, __half) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
}

// `trace` starts as 0. Each half becomes NaN once that half of a `pair` is not finite, and stays 0 otherwise.
__device__ __forceinline__ void trace_pair(uint32_t& trace, uint32_t pair, __nv_bfloat16) {
    asm volatile("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(trace) : "r"(pair), "r"(0u));
}
__device__ __forceinline__ void trace_pair(uint32_t& trace, uint32_t pair, __half) {
    asm volatile("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(trace) : "r"(pair), "r"(0u));
}

__device__ __forceinline__ __nv_bfloat16 from_float(float x, __nv_bfloat16) { return __float2bfloat16_rn(x); }
__device__ __forceinline__ __half from_float(float x, __half) { return __float2half_rn(x); }
__device__ __forceinline__ float from_float(float x, float) { return x; }

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }

}  // namespace libflash::cuda
