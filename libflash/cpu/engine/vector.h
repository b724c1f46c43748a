// Vectors of one register for any instruction set: GCC and Clang vector types for plain arithmetic, intrinsics for what those
// cannot express. Everything in engine/ is compiled once for each instruction set in a namespace of that name, and is forced
// inline or has internal linkage: the linker must never keep a function compiled for AVX-512 for callers of other instruction
// sets.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns in its own _mm512_undefined_ps
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(LIBFLASH_NEON)  // not defined for the portable code, also where it is compiled for Arm
#include <arm_neon.h>
#endif

#include "cpu/convert.h"

#define FLASH_INLINE inline __attribute__((always_inline))
#define FLASH_UNROLL _Pragma("GCC unroll 16")

namespace libflash::cpu {
namespace LIBFLASH_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kVectorRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kVectorRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 16;
#endif

template <class T>
struct VectorOf {
    typedef T type __attribute__((vector_size(kVectorBytes)));
    typedef T unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};
template <class T>
using Vec = typename VectorOf<T>::type;
template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

using F32 = Vec<float>;
using F64 = Vec<double>;
using U32 = Vec<uint32_t>;
using I32 = Vec<int32_t>;
using U64 = Vec<uint64_t>;

// The signed integer of the same size: the result type of comparisons.
template <class T>
struct IntegerOf;
template <>
struct IntegerOf<float> {
    using type = int32_t;
};
template <>
struct IntegerOf<double> {
    using type = int64_t;
};
template <class T>
using Integer = typename IntegerOf<T>::type;

template <class T>
FLASH_INLINE Vec<T> load(const T* p) {
    return *reinterpret_cast<const typename VectorOf<T>::unaligned*>(p);
}
template <class T>
FLASH_INLINE void store(T* p, Vec<T> v) {
    *reinterpret_cast<typename VectorOf<T>::unaligned*>(p) = v;
}
template <class T>
FLASH_INLINE Vec<T> broadcast(T x) {
    return x - Vec<T>{};
}
template <class T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

// 0, 1, 2, ...
template <class T>
FLASH_INLINE Vec<T> lane_numbers() {
    Vec<T> v{};
    for (int i = 0; i < kLanes<T>; ++i) v[i] = static_cast<T>(i);
    return v;
}

// a * b + c, fused if the hardware has it: on Arm the compiler does that by itself.
template <class V>
FLASH_INLINE V multiply_add(V a, V b, V c) {
    return a * b + c;
}
#if defined(__AVX512F__)
FLASH_INLINE F32 multiply_add(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
FLASH_INLINE F64 multiply_add(F64 a, F64 b, F64 c) { return _mm512_fmadd_pd(a, b, c); }
#elif defined(__FMA__)
FLASH_INLINE F32 multiply_add(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
FLASH_INLINE F64 multiply_add(F64 a, F64 b, F64 c) { return _mm256_fmadd_pd(a, b, c); }
#endif

// NaN if b is NaN. a is never NaN.
template <class V>
FLASH_INLINE V maximum(V a, V b) {
    return a > b ? a : b;
}
template <class V>
FLASH_INLINE V minimum(V a, V b) {
    return a < b ? a : b;
}
#if defined(__AVX512F__)
FLASH_INLINE F32 maximum(F32 a, F32 b) { return _mm512_max_ps(a, b); }
FLASH_INLINE F64 maximum(F64 a, F64 b) { return _mm512_max_pd(a, b); }
FLASH_INLINE F32 minimum(F32 a, F32 b) { return _mm512_min_ps(a, b); }
FLASH_INLINE F64 minimum(F64 a, F64 b) { return _mm512_min_pd(a, b); }
#elif defined(__AVX2__)
FLASH_INLINE F32 maximum(F32 a, F32 b) { return _mm256_max_ps(a, b); }
FLASH_INLINE F64 maximum(F64 a, F64 b) { return _mm256_max_pd(a, b); }
FLASH_INLINE F32 minimum(F32 a, F32 b) { return _mm256_min_ps(a, b); }
FLASH_INLINE F64 minimum(F64 a, F64 b) { return _mm256_min_pd(a, b); }
#elif defined(LIBFLASH_NEON)
FLASH_INLINE F32 maximum(F32 a, F32 b) { return vmaxq_f32(a, b); }
FLASH_INLINE F64 maximum(F64 a, F64 b) { return vmaxq_f64(a, b); }
FLASH_INLINE F32 minimum(F32 a, F32 b) { return vminq_f32(a, b); }
FLASH_INLINE F64 minimum(F64 a, F64 b) { return vminq_f64(a, b); }
#endif

// The maximum of a and b where a is a number, else b, which is never NaN.
#if defined(LIBFLASH_NEON)
FLASH_INLINE F32 maximum_of_numbers(F32 a, F32 b) { return vmaxnmq_f32(a, b); }
FLASH_INLINE F64 maximum_of_numbers(F64 a, F64 b) { return vmaxnmq_f64(a, b); }
#else
template <class V>
FLASH_INLINE V maximum_of_numbers(V a, V b) {
    return maximum(a, b);  // compares false where a is NaN
}
#endif

template <class V>
FLASH_INLINE V magnitude(V a) {
    return a < 0 ? -a : a;
}

// Rounds to the nearest integer, for |x| < 2^21 (float) or 2^50 (double).
template <class T>
FLASH_INLINE Vec<T> round_to_integer(Vec<T> x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return _mm512_roundscale_ps(x, 8);
    else
        return _mm512_roundscale_pd(x, 8);
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4)
        return _mm256_round_ps(x, 8);
    else
        return _mm256_round_pd(x, 8);
#elif defined(LIBFLASH_NEON)
    if constexpr (sizeof(T) == 4)
        return vrndnq_f32(x);
    else
        return vrndnq_f64(x);
#else
    const T magic = sizeof(T) == 4 ? T(12582912) : T(6755399441055744);  // 1.5 * 2^23, 1.5 * 2^52
    return (x + magic) - magic;
#endif
}

template <class T>
FLASH_INLINE T sum_of_lanes(Vec<T> v) {
    T sum[kLanes<T>];
    store(sum, v);
    for (int step = kLanes<T> / 2; step > 0; step /= 2)
        for (int i = 0; i < step; ++i) sum[i] += sum[i + step];
    return sum[0];
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
