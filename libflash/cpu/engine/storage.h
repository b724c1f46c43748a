// Loads and stores of vectors in the four storage types. The accumulator type is float, or double for double. A vector with L
// accumulators is loaded from, and stored to, L consecutive elements of the storage type.
#pragma once

#include "cpu/engine/vector.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

template <class T>
struct AccumulatorOfStorage {
    using type = float;
};
template <>
struct AccumulatorOfStorage<double> {
    using type = double;
};
template <class T>
using Acc = typename AccumulatorOfStorage<T>::type;

typedef uint16_t U16Half __attribute__((vector_size(kVectorBytes / 2)));  // one 16-bit value for each float lane
typedef uint16_t U16HalfUnaligned __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

#if defined(LIBFLASH_NEON)  // GCC compiles the general form to one load for each element
FLASH_INLINE U32 load_u16(const uint16_t* p) { return vmovl_u16(vld1_u16(p)); }
FLASH_INLINE void store_u16(uint16_t* p, U32 v) { vst1_u16(p, vmovn_u32(v)); }
#else
FLASH_INLINE U32 load_u16(const uint16_t* p) {
    return __builtin_convertvector(*reinterpret_cast<const U16HalfUnaligned*>(p), U32);
}
FLASH_INLINE void store_u16(uint16_t* p, U32 v) { *reinterpret_cast<U16HalfUnaligned*>(p) = __builtin_convertvector(v, U16Half); }
#endif

FLASH_INLINE F32 load_wide(const float* p) { return load(p); }
FLASH_INLINE F64 load_wide(const double* p) { return load(p); }
FLASH_INLINE F32 load_wide(const bfloat16* p) {
#if defined(LIBFLASH_NEON)
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16));
#else
    return (F32)(load_u16(&p->bits) << 16);
#endif
}
#if defined(LIBFLASH_NEON)
FLASH_INLINE F32 widen_half_bits(uint16x4_t bits) { return vcvt_f32_f16(vreinterpret_f16_u16(bits)); }
#endif
FLASH_INLINE F32 load_wide(const half* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(LIBFLASH_NEON)
    return widen_half_bits(vld1_u16(&p->bits));
#else
    F32 v;
    for (int i = 0; i < kLanes<float>; ++i) v[i] = widen(p[i]);
    return v;
#endif
}

// Rounds to nearest, ties to even; subnormals are kept, NaN stays NaN.
FLASH_INLINE U32 round_to_bf16(F32 v) {
    const U32 bits = (U32)v, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return v == v ? rounded : (bits >> 16 | 0x40u);
}

FLASH_INLINE void store_narrow(float* p, F32 v) { store(p, v); }
FLASH_INLINE void store_narrow(double* p, F64 v) { store(p, v); }
FLASH_INLINE void store_narrow(bfloat16* p, F32 v) {
#if defined(LIBFLASH_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    vst1_u16(&p->bits, vreinterpret_u16_bf16(vcvt_bf16_f32(v)));
#else
    store_u16(&p->bits, round_to_bf16(v));
#endif
}
FLASH_INLINE void store_narrow(half* p, F32 v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(LIBFLASH_NEON)
    vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(v)));
#else
    for (int i = 0; i < kLanes<float>; ++i) cpu::store(p[i], static_cast<double>(v[i]));
#endif
}

// The first `count` elements; the other lanes are 0. Accesses no memory beyond them.
template <class T>
FLASH_INLINE Vec<Acc<T>> load_part(const T* p, int64_t count) {
    if (count >= kLanes<Acc<T>>) return load_wide(p);
    T part[kLanes<Acc<T>>] = {};
    for (int64_t i = 0; i < count; ++i) part[i] = p[i];
    return load_wide(part);
}
template <class T>
FLASH_INLINE void store_part(T* p, Vec<Acc<T>> v, int64_t count) {
    if (count >= kLanes<Acc<T>>) return store_narrow(p, v);
    T part[kLanes<Acc<T>>];
    store_narrow(part, v);
    for (int64_t i = 0; i < count; ++i) p[i] = part[i];
}

FLASH_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
