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
#else
#define FLASH_BF16_DOT 0
#endif

enum class Start { zero, add, scaled };  // what the sum is added to: 0, C, or C * factors[n]

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
    const Acc* factors;
};

template <int M, int NV, class E>
__attribute__((noinline)) static void multiply_tile(const Product<E>& p, int64_t m0, int64_t n0) {
    using Acc = Accumulator<E>;
    constexpr int L = kLanes<Acc>;
    const int64_t a_m = p.a_m, a_k = p.a_k, b_k = p.b_k, c_m = p.c_m;
    Acc* c = p.c + m0 * c_m + n0;
    Vec<Acc> sum[M][NV];
    FLASH_UNROLL
    for (int m = 0; m < M; ++m) {
        FLASH_UNROLL
        for (int n = 0; n < NV; ++n) sum[m][n] = Vec<Acc>{};
    }
    const E *a = p.a + m0 * a_m, *b = p.b + n0;
    for (int64_t k = p.k; k > 0; --k, a += a_k, b += b_k) {
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

// Rows of a register tile that is NV vectors wide: the accumulators, one row of B and one element of A must fit the registers.
template <int NV>
constexpr int kTileRows = NV == 1                                ? 8
                          : (kVectorRegisters - 1 - NV) / NV > 6 ? 6
                                                                 : (kVectorRegisters - 1 - NV) / NV;

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
static void multiply_columns(const Product<E>& p, int64_t n0) {
    constexpr int M = kTileRows<NV>;
    int64_t m = 0;
    for (; m + M <= p.m; m += M) multiply_tile<M, NV>(p, m, n0);
    multiply_last_rows<M - 1, NV>(p, m, n0, p.m - m);
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
