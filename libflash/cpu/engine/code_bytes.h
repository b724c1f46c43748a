// 64 neighbouring codes of an 8-bit KV cache at a time, with AVX512_VBMI: the two bytes of a bfloat16, which represents every
// code exactly, come from tables. For e4m3 this takes a third of the instructions of load_wide() in codes.h, with the same
// values. Only for e4m3 and e5m2: int8 takes fewer instructions without tables.
#pragma once

#include <type_traits>

#include "cpu/engine/vector.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int kCodesAtOnce = 64;

#if defined(__AVX512VBMI__)

template <class C>
constexpr bool kHasCodeTables = std::is_same_v<C, e4m3> || std::is_same_v<C, e5m2>;

// The bits of fraction * 2^exponent as bfloat16, for fraction < 256.
constexpr uint16_t bfloat16_bits(int fraction, int exponent) {
    if (fraction == 0) return 0;
    for (; fraction < 128; fraction *= 2) --exponent;
    return static_cast<uint16_t>((exponent + 7 + 127) << 7 | (fraction - 128));
}

// The bits of the code without its sign bit.
constexpr uint16_t bits_of_magnitude(int magnitude, e4m3) {
    const int exponent = magnitude >> 3, fraction = magnitude & 7;
    if (magnitude == 0x7f) return 0x7fc0;
    return exponent > 0 ? bfloat16_bits(8 + fraction, exponent - 10) : bfloat16_bits(fraction, -9);
}
constexpr uint16_t bits_of_magnitude(int magnitude, e5m2) {
    const int exponent = magnitude >> 2, fraction = magnitude & 3;
    if (exponent == 31) return static_cast<uint16_t>(fraction > 0 ? 0x7fc0 | fraction << 5 : 0x7f80);
    return exponent > 0 ? bfloat16_bits(4 + fraction, exponent - 17) : bfloat16_bits(fraction, -16);
}

template <class C>
struct CodeTables {
    alignas(64) uint8_t high[128] = {}, low[128] = {};

    constexpr CodeTables() {
        for (int i = 0; i < 128; ++i) {
            const uint16_t bits = bits_of_magnitude(i, C{});
            high[i] = static_cast<uint8_t>(bits >> 8), low[i] = static_cast<uint8_t>(bits & 0xff);
        }
    }
};
template <class C>
static constexpr CodeTables<C> kCodeTables{};

struct BytesOfCodes {
    __m512i high, low;
};

template <class C>
FLASH_INLINE BytesOfCodes bytes_of_codes(__m512i codes) {
    const auto look_up = [codes](const uint8_t* table)
                             __attribute__((always_inline)) {  // an index has 7 bits, so the sign does not count
                                 return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
                             };
    BytesOfCodes bytes{look_up(kCodeTables<C>.high), look_up(kCodeTables<C>.low)};
    constexpr int kFirstOrBothOthers = 0xf8;
    bytes.high = _mm512_ternarylogic_epi32(bytes.high, codes, _mm512_set1_epi8(-128), kFirstOrBothOthers);  // the sign
    return bytes;
}

// Where the bytes of 64 channels must be so that load_codes() finds 16 neighbouring channels in each of its vectors.
struct ChannelOrder {
    alignas(64) uint8_t channels[64] = {};

    constexpr ChannelOrder() {
        for (int i = 0; i < 64; ++i) channels[i] = static_cast<uint8_t>(i % 2 * 16 + i / 8 % 2 * 32 + i / 16 * 4 + i / 2 % 4);
    }
};
static constexpr ChannelOrder kChannelOrder{};

// 64 channels, 16 in a vector. A bfloat16 is the upper half of a float.
template <class C>
FLASH_INLINE void load_codes(const C* p, F32* to) {
    const __m512i order = _mm512_load_si512(kChannelOrder.channels), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const BytesOfCodes bytes = bytes_of_codes<C>(_mm512_permutexvar_epi8(order, _mm512_loadu_si512(p)));
    const __m512i first = _mm512_unpacklo_epi8(bytes.low, bytes.high), second = _mm512_unpackhi_epi8(bytes.low, bytes.high);
    to[0] = (F32)_mm512_slli_epi32(first, 16), to[1] = (F32)_mm512_and_si512(first, upper);
    to[2] = (F32)_mm512_slli_epi32(second, 16), to[3] = (F32)_mm512_and_si512(second, upper);
}
// The bytes of pairs of neighbouring channels: to be interleaved, the lower half of each lane for the first 32 channels.
template <class C>
FLASH_INLINE BytesOfCodes bytes_of_pairs(__m512i codes) {
    return bytes_of_codes<C>(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes));
}
// 64 channels as pairs, and 32 channels.
template <class C>
FLASH_INLINE void load_codes(const C* p, U32* to) {
    const BytesOfCodes bytes = bytes_of_pairs<C>(_mm512_loadu_si512(p));
    to[0] = (U32)_mm512_unpacklo_epi8(bytes.low, bytes.high), to[1] = (U32)_mm512_unpackhi_epi8(bytes.low, bytes.high);
}
template <class C>
FLASH_INLINE U32 load_half_of_codes(const C* p) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const BytesOfCodes bytes = bytes_of_pairs<C>(_mm512_zextsi256_si512(codes));
    return (U32)_mm512_unpacklo_epi8(bytes.low, bytes.high);
}
// 64 channels of two rows: in each lane a channel of the first row, then of the second.
template <class C>
FLASH_INLINE void load_row_pairs(const C* first, const C* second, U32* to) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const BytesOfCodes a = bytes_of_codes<C>(_mm512_permutexvar_epi32(order, _mm512_loadu_si512(first)));
    const BytesOfCodes b = bytes_of_codes<C>(_mm512_permutexvar_epi32(order, _mm512_loadu_si512(second)));
    const __m512i a_begin = _mm512_unpacklo_epi8(a.low, a.high), a_end = _mm512_unpackhi_epi8(a.low, a.high);
    const __m512i b_begin = _mm512_unpacklo_epi8(b.low, b.high), b_end = _mm512_unpackhi_epi8(b.low, b.high);
    to[0] = (U32)_mm512_unpacklo_epi16(a_begin, b_begin), to[1] = (U32)_mm512_unpackhi_epi16(a_begin, b_begin);
    to[2] = (U32)_mm512_unpacklo_epi16(a_end, b_end), to[3] = (U32)_mm512_unpackhi_epi16(a_end, b_end);
}

#else

template <class C>
constexpr bool kHasCodeTables = false;

#endif

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
