// The matrix product of the engine: C[m][n] (+)= sum_k A(m, k) B[k][n].
//
// Vectors run along n. Elements of A are broadcast one by one, so A may be any strided view and is never packed. Rows of B and C
// are contiguous and a multiple of the vector length wide. A register tile of M x NV vectors of C stays in registers for the
// whole sum over k. The sum starts at zero and the old C is added at the end, so C is rounded once per product, not once per k.
#pragma once

#include "cpu/engine/vector.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// Two neighbouring bf16 values, the operand of the bf16 dot product. The first is in the low half.
struct Pair {
    uint32_t bits;
};

template <class E>
struct AccumulatorOf {
    using type = E;
};
template <>
struct AccumulatorOf<Pair> {
    using type = float;
};
template <class E>
using Accumulator = typename AccumulatorOf<E>::type;

template <class E>
FLASH_INLINE auto load_b(const E* p) {
    return load(p);
}
template <class E>
FLASH_INLINE auto broadcast_a(const E* p) {
    return broadcast(*p);
}
template <class V>
FLASH_INLINE V dot_step(V a, V b, V sum) {
    return multiply_add(a, b, sum);
}
#if defined(__AVX512BF16__)
#define FLASH_BF16_DOT 1
FLASH_INLINE U32 load_b(const Pair* p) { return load(&p->bits); }
FLASH_INLINE U32 broadcast_a(const Pair* p) {
    uint32_t bits;  // rows of bf16 need not be aligned to 4 bytes
    std::memcpy(&bits, p, sizeof bits);
    return (U32)_mm512_set1_epi32(static_cast<int>(bits));
}
FLASH_INLINE F32 dot_step(U32 a, U32 b, F32 sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#elif defined(LIBFLASH_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FLASH_BF16_DOT 1
FLASH_INLINE U32 load_b(const Pair* p) { return load(&p->bits); }
FLASH_INLINE U32 broadcast_a(const Pair* p) {
    uint32_t bits;  // rows of bf16 need not be aligned to 4 bytes
    std::memcpy(&bits, p, sizeof bits);
    return broadcast(bits);
}
FLASH_INLINE F32 dot_step(U32 a, U32 b, F32 sum) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}
#else
#define FLASH_BF16_DOT 0
#endif

#if FLASH_BF16_DOT
// Rounds neighbouring values to pairs: those of `first`, then those of `second`.
FLASH_INLINE U32 round_to_pairs(F32 first, F32 second) {
#if defined(__AVX512BF16__)
    return (U32)_mm512_cvtne2ps_pbh(second, first);
#else
    return vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second));
#endif
}
#endif

// Rows of A that one instruction multiplies.
template <class E>
constexpr int kRowsAtOnce = 1;
#if FLASH_BF16_DOT && defined(LIBFLASH_NEON)
template <>
constexpr int kRowsAtOnce<Pair> = 2;
#endif

enum class Start { zero, add, scaled };  // what the sum is added to: 0, C, or C * factors[n]

// A(m, k) = a[m * a_m + k * a_k], B[k][n] = b[k * b_k + n], C[m][n] = c[m * c_m + n]; strides in elements.
template <class E>
struct Product {
    using Acc = Accumulator<E>;
    int64_t m, n, k;
    const E* a;
    int64_t a_m, a_k;
    const E* b;
    int64_t b_k;
    Acc* c;
    int64_t c_m;
    Start start;
    const Acc* factors;                 // for Start::scaled
    const void* interleaved = nullptr;  // of gemm_bfmmla.h: the columns of B that are multiplied, in the order of the instruction
};

// sum[m][n] += sum_k A(m, k) B[k][n] for a register tile and `k` steps; `a` and `b` are its first elements.
template <int M, int NV, class E>
FLASH_INLINE void add_products_one_by_one(const Product<E>& p, int64_t k, const E* a, const E* b,
                                          Vec<Accumulator<E>> (&sum)[M][NV]) {
    constexpr int L = kLanes<Accumulator<E>>;
    const int64_t a_m = p.a_m, a_k = p.a_k, b_k = p.b_k;
    for (; k > 0; --k, a += a_k, b += b_k) {
        decltype(load_b(b)) row[NV];
        FLASH_UNROLL
        for (int n = 0; n < NV; ++n) row[n] = load_b(b + n * L);
        FLASH_UNROLL
        for (int m = 0; m < M; ++m) {
            const auto x = broadcast_a(a + m * a_m);
            FLASH_UNROLL
            for (int n = 0; n < NV; ++n) sum[m][n] = dot_step(x, row[n], sum[m][n]);
        }
    }
}

template <int M, int NV, class E>
FLASH_INLINE void add_products(const Product<E>& p, const E* a, const E* b, Vec<Accumulator<E>> (&sum)[M][NV]) {
    add_products_one_by_one(p, p.k, a, b, sum);
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu

// Overloads for some instruction sets.
#if defined(LIBFLASH_NEON)
#include "cpu/engine/gemm_by_lane.h"
#if FLASH_BF16_DOT
#include "cpu/engine/gemm_bfmmla.h"
#endif
#endif

namespace libflash::cpu {
namespace LIBFLASH_ISA {

template <int M, int NV, class E>
__attribute__((noinline)) static void multiply_tile(const Product<E>& p, int64_t m0, int64_t n0) {
    using Acc = Accumulator<E>;
    constexpr int L = kLanes<Acc>;
    const int64_t c_m = p.c_m;
    Acc* c = p.c + m0 * c_m + n0;
    Vec<Acc> sum[M][NV];
    FLASH_UNROLL
    for (int m = 0; m < M; ++m) {
        FLASH_UNROLL
        for (int n = 0; n < NV; ++n) sum[m][n] = Vec<Acc>{};
    }
    add_products(p, p.a + m0 * p.a_m, p.b + n0, sum);
    if (p.start != Start::zero) {
        Vec<Acc> factor[NV];
        FLASH_UNROLL
        for (int n = 0; n < NV; ++n) factor[n] = p.start == Start::scaled ? load(p.factors + n0 + n * L) : broadcast<Acc>(1);
        FLASH_UNROLL
        for (int m = 0; m < M; ++m) {
            FLASH_UNROLL
            for (int n = 0; n < NV; ++n) sum[m][n] = multiply_add(load(c + m * c_m + n * L), factor[n], sum[m][n]);
        }
    }
    FLASH_UNROLL
    for (int m = 0; m < M; ++m) {
        FLASH_UNROLL
        for (int n = 0; n < NV; ++n) store(c + m * c_m + n * L, sum[m][n]);
    }
}

// Rows of a register tile that is NV vectors wide: the accumulators, one row of B and what is loaded of A must fit the registers.
#if defined(LIBFLASH_NEON)
constexpr int kRegistersOfRow = 1;  // a vector of A
#else
constexpr int kRegistersOfRow = 0;  // one element of A, for one row at a time
#endif
constexpr int tile_rows(int vectors) {
    const int fit = (kVectorRegisters - 1 + kRegistersOfRow - vectors) / (vectors + kRegistersOfRow);
    return vectors == 1 ? 8 : fit > 6 ? 6 : fit;
}
template <int NV, class E>
constexpr int kTileRows = tile_rows(NV) / kRowsAtOnce<E> * kRowsAtOnce<E>;

template <int M, int NV, class E>
FLASH_INLINE void multiply_last_rows(const Product<E>& p, int64_t m0, int64_t n0, int64_t rows) {
    if constexpr (M > 0) {
        if (rows == M)
            multiply_tile<M, NV>(p, m0, n0);
        else
            multiply_last_rows<M - 1, NV>(p, m0, n0, rows);
    }
}

template <int NV, class E>
static void multiply_all_rows(const Product<E>& p, int64_t n0) {
    constexpr int M = kTileRows<NV, E>;
    int64_t m = 0;
    for (; m + M <= p.m; m += M) multiply_tile<M, NV>(p, m, n0);
    multiply_last_rows<M - 1, NV>(p, m, n0, p.m - m);
}

template <int NV, class E>
static void multiply_columns(const Product<E>& p, int64_t n0) {
#if FLASH_BF16_DOT && defined(LIBFLASH_NEON)
    if constexpr (__is_same(E, Pair)) {
        if (p.m > kTileRows<NV, E> && p.k <= kMostInterleavedPairs) {
            bfloat16x8_t columns[kMostInterleavedPairs * NV];
            interleave_columns<NV>(p, n0, columns);
            Product<E> with_columns = p;
            with_columns.interleaved = columns;
            return multiply_all_rows<NV>(with_columns, n0);
        }
    }
#endif
    multiply_all_rows<NV>(p, n0);
}

constexpr int kTileVectors = kVectorRegisters == 32 ? 4 : 2;

// p.n must be a multiple of the vector length.
template <class E>
static void multiply(const Product<E>& p) {
    constexpr int L = kLanes<Accumulator<E>>;
    int64_t n = 0;
    for (; n + kTileVectors * L <= p.n; n += kTileVectors * L) multiply_columns<kTileVectors>(p, n);
    if constexpr (kTileVectors > 2) {
        if (n + 2 * L <= p.n) multiply_columns<2>(p, n), n += 2 * L;
    }
    if (n < p.n) multiply_columns<1>(p, n);
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
