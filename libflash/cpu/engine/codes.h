// Vectors and operands of products from the rows of an 8-bit KV cache. Every code, without its scale, is exact in every type of
// q. So a product has the same bits as with a cache of q's type that holds the same numbers.
#pragma once

#include <type_traits>

#include "cpu/engine/code_bytes.h"
#include "cpu/engine/pack.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

#if defined(__AVX512F__)
FLASH_INLINE F32 widen_half_bits(__m256i bits) { return _mm512_cvtph_ps(bits); }
FLASH_INLINE __m128i load_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
FLASH_INLINE F32 load_wide(const int8* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(p))); }
FLASH_INLINE F32 load_wide(const e5m2* p) { return widen_half_bits(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load_bytes(p)), 8)); }
// The code's exponent and mantissa become those of a half. The factor 256 is needed because the exponent bias of half is larger
// by 8. The magnitude 0x7f is NaN.
FLASH_INLINE F32 load_wide(const e4m3* p) {
    const __m256i code = _mm256_cvtepi8_epi16(load_bytes(p)), magnitude = _mm256_set1_epi16(0x7f);
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(code, magnitude), magnitude);
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    return widen_half_bits(_mm256_or_si256(bits, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)))) * 256;
}
#elif defined(__AVX2__) && defined(__F16C__)
FLASH_INLINE F32 widen_half_bits(__m128i bits) { return _mm256_cvtph_ps(bits); }
FLASH_INLINE __m128i load_bytes(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
FLASH_INLINE F32 load_wide(const int8* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(p))); }
FLASH_INLINE F32 load_wide(const e5m2* p) { return widen_half_bits(_mm_slli_epi16(_mm_cvtepu8_epi16(load_bytes(p)), 8)); }
FLASH_INLINE F32 load_wide(const e4m3* p) {
    const __m128i code = _mm_cvtepi8_epi16(load_bytes(p)), magnitude = _mm_set1_epi16(0x7f);
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(code, magnitude), magnitude);
    const __m128i bits = _mm_and_si128(_mm_slli_epi16(code, 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
    return widen_half_bits(_mm_or_si128(bits, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)))) * 256;
}
#elif defined(LIBFLASH_NEON)
FLASH_INLINE uint8x8_t load_bytes(const void* p) {
    uint32_t four;  // rows need not be aligned
    std::memcpy(&four, p, sizeof four);
    return vcreate_u8(four);
}
FLASH_INLINE int16x4_t widen_code(const void* p) { return vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_bytes(p)))); }
FLASH_INLINE F32 load_wide(const int8* p) { return vcvtq_f32_s32(vmovl_s16(widen_code(p))); }
FLASH_INLINE F32 load_wide(const e5m2* p) { return widen_half_bits(vget_low_u16(vshll_n_u8(load_bytes(p), 8))); }
FLASH_INLINE F32 load_wide(const e4m3* p) {
    const uint16x4_t code = vreinterpret_u16_s16(widen_code(p)), magnitude = vdup_n_u16(0x7f);
    const uint16x4_t nan = vceq_u16(vand_u16(code, magnitude), magnitude);
    const uint16x4_t bits = vand_u16(vshl_n_u16(code, 7), vdup_n_u16(0xbf80));
    return widen_half_bits(vorr_u16(bits, vand_u16(nan, vdup_n_u16(0x7e00)))) * 256;
}
#else
template <class C, std::enable_if_t<sizeof(C) == 1, int> = 0>
FLASH_INLINE F32 load_wide(const C* p) {
    F32 v;
    for (int i = 0; i < kLanes<float>; ++i) v[i] = widen(p[i]);
    return v;
}
#endif

// Loads as many values of a row as a vector of accumulators has lanes, from a cache of type C.
template <class A, class C>
FLASH_INLINE Vec<A> load_cached(const C* p) {
    static_assert(std::is_same_v<Acc<C>, A>);
    return load_wide(p);
}
// The first `count` of them; the other lanes are 0. Accesses no memory beyond them.
template <class A, class C>
FLASH_INLINE Vec<A> load_cached_part(const C* p, int64_t count) {
    if (count >= kLanes<A>) return load_cached<A>(p);
    C part[kLanes<A>] = {};
    for (int64_t i = 0; i < count; ++i) part[i] = p[i];
    return load_cached<A>(part);
}

#if FLASH_BF16_DOT
// Pairs of neighbouring channels.
template <class C>
FLASH_INLINE U32 load_code_pairs(const C* p) {
    if constexpr (kHasCodeTables<C>)
        return load_half_of_codes(p);
    else
        return round_to_pairs(load_wide(p), load_wide(p + kLanes<float>));
}
template <class C>
FLASH_INLINE U32 load_code_pairs_part(const C* p, int64_t count) {
    if (count >= 2 * kLanes<float>) return load_code_pairs(p);
    C part[2 * kLanes<float>] = {};
    for (int64_t i = 0; i < count; ++i) part[i] = p[i];
    return load_code_pairs(part);
}
#endif

// Stores the channels of a row that come 64 at a time from tables. Returns their number.
template <class V, class C>
FLASH_INLINE int64_t store_codes(const C* row, int64_t channels, float* to) {
    int64_t c = 0;
    if constexpr (kHasCodeTables<C>) {
        constexpr int kVectors = kCodesAtOnce / (std::is_same_v<V, U32> ? 2 : 1) / kLanes<float>;
        for (; c + kCodesAtOnce <= channels; c += kCodesAtOnce) {
            V x[kVectors];
            load_codes(row + c, x);
            FLASH_UNROLL
            for (int n = 0; n < kVectors; ++n, to += kLanes<float>) store(to, (F32)x[n]);
        }
    }
    return c;
}

// rows_operand() for rows of a cache of another type than T: they are converted to `buffer`.
template <class T, class Rows>
static Operand<Element<T>> code_rows_operand(const Rows& rows, int64_t first, int64_t count, int64_t channels,
                                             Element<T>* buffer) {
    using A = Acc<T>;
    const int64_t width = elements_for<T>(channels);
    for (int64_t r = 0; r < count; ++r) {
        const auto* row = rows(first + r);
        if constexpr (kPaired<T>) {
#if FLASH_BF16_DOT
            float* to = reinterpret_cast<float*>(buffer + r * width);
            for (int64_t c = store_codes<U32>(row, channels, to) / 2; c < width; c += kLanes<float>)
                store_part(to + c, (F32)load_code_pairs_part(row + 2 * c, channels - 2 * c), width - c);
#endif
        } else {
            for (int64_t c = store_codes<F32>(row, channels, buffer + r * width); c < channels; c += kLanes<A>)
                store_part(buffer + r * width + c, load_cached_part<A>(row + c, channels - c), channels - c);
        }
    }
    return {buffer, width};
}

// row_elements_operand() for rows of a cache of another type than T.
template <class T, class Rows>
static Operand<Element<T>> code_row_elements_operand(const Rows& rows, int64_t first, int64_t count, int64_t channels,
                                                     Element<T>* buffer) {
    if constexpr (kPaired<T>) {
#if FLASH_BF16_DOT
        using C = std::remove_const_t<std::remove_pointer_t<decltype(rows(0))>>;
        for (int64_t r = 0; r < count; r += 2) {
            const C *low = rows(first + r), *high = r + 1 < count ? rows(first + r + 1) : nullptr;
            float* to = reinterpret_cast<float*>(buffer + r / 2 * channels);
            int64_t c = 0;
            if constexpr (kHasCodeTables<C>) {
                for (; high && c + kCodesAtOnce <= channels; c += kCodesAtOnce) {
                    U32 pairs[kCodesAtOnce / kLanes<float>];
                    load_row_pairs(low + c, high + c, pairs);
                    FLASH_UNROLL
                    for (int n = 0; n < kCodesAtOnce / kLanes<float>; ++n) store(to + c + n * kLanes<float>, (F32)pairs[n]);
                }
            }
            for (; c < channels; c += kLanes<float>) {
                U32 pairs = (U32)load_cached_part<float>(low + c, channels - c) >> 16;
                if (high) pairs |= (U32)load_cached_part<float>(high + c, channels - c) & 0xffff0000u;
                store_part(to + c, (F32)pairs, channels - c);
            }
        }
#endif
        return {buffer, channels};
    } else {
        return code_rows_operand<T>(rows, first, count, channels, buffer);
    }
}

// Operands from rows whose elements are of type T or codes.
template <class T, class Rows>
FLASH_INLINE Operand<Element<T>> cached_rows_operand(const Rows& rows, int64_t first, int64_t count, int64_t channels,
                                                     Element<T>* buffer) {
    if constexpr (std::is_same_v<decltype(rows(0)), const T*>)
        return rows_operand<T>(rows, first, count, channels, buffer, Reads::once);
    else
        return code_rows_operand<T>(rows, first, count, channels, buffer);
}
template <class T, class Rows>
FLASH_INLINE Operand<Element<T>> cached_row_elements_operand(const Rows& rows, int64_t first, int64_t count, int64_t channels,
                                                             Element<T>* buffer) {
    if constexpr (std::is_same_v<decltype(rows(0)), const T*>)
        return row_elements_operand<T>(rows, first, count, channels, buffer);
    else
        return code_row_elements_operand<T>(rows, first, count, channels, buffer);
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
