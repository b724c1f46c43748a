// The dropout mask of libflash.h for a tile of probabilities: Philox4x32-7 with one counter in each 64-bit lane, one query row
// per lane. cpu/philox.h is the scalar version.
#pragma once

#include "cpu/engine/lanes.h"
#include "cpu/philox.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// Product of the low 32 bits of each lane.
FLASH_INLINE U64 multiply_low(U64 a, uint32_t b) {
#if defined(__AVX512F__)
    return (U64)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
    return (U64)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
    return (U64)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#elif defined(LIBFLASH_NEON)
    return (U64)vmull_n_u32(vmovn_u64(a), b);
#else
    return (a & 0xffffffffu) * uint64_t{b};
#endif
}

// The four random words of each counter, in the low halves of the lanes; the high halves are undefined.
struct PhiloxLanes {
    U64 word[4];
};
FLASH_INLINE PhiloxLanes philox_lanes(U64 c0, U64 c1, U64 c2, U64 c3, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 7; ++round) {
        const U64 product0 = multiply_low(c0, 0xD2511F53u), product1 = multiply_low(c2, 0xCD9E8D57u);
        c0 = product1 >> 32 ^ c1 ^ uint64_t{k0};
        c2 = product0 >> 32 ^ c3 ^ uint64_t{k1};
        c1 = product1;
        c3 = product0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

typedef uint32_t U32Half __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t U32HalfUnaligned __attribute__((vector_size(kVectorBytes / 2), aligned(4), may_alias));

// numbers[n][i]: the random number of the row at position rows[i] and the column at position 8 * octet + n.
static void dropout_numbers(const DropoutMask& mask, const uint64_t* rows, int64_t width, int64_t octet,
                            uint32_t (*numbers)[kQueryTileRows]) {
    for (int64_t i = 0; i < width; i += kLanes<uint64_t>) {
        const PhiloxLanes lanes =
            philox_lanes(broadcast<uint64_t>(static_cast<uint64_t>(octet)), load(rows + i), broadcast<uint64_t>(mask.head),
                         broadcast<uint64_t>(mask.offset), mask.key0, mask.key1);
        for (int n = 0; n < 8; ++n)
            *reinterpret_cast<U32HalfUnaligned*>(numbers[n] + i) =
                __builtin_convertvector(lanes.word[n / 2] >> n % 2 * 16 & 0xffffu, U32Half);
    }
}

// Comparison results: all bits set in the lanes whose random number is at least the threshold.
FLASH_INLINE I32 kept_lanes(const uint32_t* numbers, uint32_t threshold, float) { return (I32)(load(numbers) >= threshold); }
FLASH_INLINE Vec<int64_t> kept_lanes(const uint32_t* numbers, uint32_t threshold, double) {
    const U64 wide = __builtin_convertvector(*reinterpret_cast<const U32HalfUnaligned*>(numbers), U64);
    return (Vec<int64_t>)(wide >= uint64_t{threshold});
}

// Sets dropped elements of tile[key][lane] to 0, for keys first to first + count - 1.
template <class A>
static void drop(const DropoutMask& mask, const Lanes<A>& lanes, int64_t first, int64_t count, A* tile) {
    alignas(64) uint32_t numbers[8][kQueryTileRows];
    alignas(64) uint64_t rows[kQueryTileRows] = {};
    for (int64_t i = 0; i < lanes.rows; ++i) rows[i] = static_cast<uint64_t>(mask.rows(lanes.row0 + i));
    int64_t octet = -1;
    for (int64_t key = first; key < first + count; ++key) {
        const int64_t column = mask.columns(key);
        if (column / 8 != octet) dropout_numbers(mask, rows, lanes.width, column / 8, numbers);
        octet = column / 8;
        for (int64_t i = 0; i < lanes.width; i += kLanes<A>) {
            A* at = tile + (key - first) * lanes.width + i;
            store(at, kept_lanes(numbers[column % 8] + i, mask.threshold, A{}) ? load(at) : Vec<A>{});
        }
    }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
