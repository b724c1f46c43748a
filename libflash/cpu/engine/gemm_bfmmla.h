// Products of bf16 pairs with the matrix instruction BFMMLA of Arm: two rows of A times two columns of B, summed over two pairs,
// which is four times the products of an instruction on floats. The operands stay as gemm.h has them; the columns of B are
// interleaved in registers. Included by gemm.h.
#pragma once

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// Two neighbouring pairs. They need not be aligned.
FLASH_INLINE uint32x2_t load_two_pairs(const Pair* p) {
    uint32x2_t pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return pairs;
}
FLASH_INLINE uint32x2_t load_pair_twice(const Pair* p) {
    uint32_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return vdup_n_u32(bits);
}

// The operand of rows m and m + 1 for pairs k and k + 1: (m, k), (m, k + 1), (m + 1, k), (m + 1, k + 1). Without a row m + 1 it
// is row m twice; without a pair k + 1 that is 0. Neighbours are either the pairs of a row (a_k = 1) or of a column (a_m = 1).
template <bool kNextRow, bool kNextPair>
FLASH_INLINE bfloat16x8_t load_two_rows(const Pair* a, int64_t a_m, int64_t a_k) {
    const uint32x2_t none = vdup_n_u32(0);
    uint32x4_t pairs;
    if (a_k == 1) {
        const Pair* next = kNextRow ? a + a_m : a;
        if constexpr (kNextPair)
            pairs = vcombine_u32(load_two_pairs(a), load_two_pairs(next));
        else
            pairs = vcombine_u32(vzip1_u32(load_pair_twice(a), none), vzip1_u32(load_pair_twice(next), none));
    } else {
        const auto column = [](const Pair* p)
                                __attribute__((always_inline)) { return kNextRow ? load_two_pairs(p) : load_pair_twice(p); };
        const uint32x2_t first = column(a), second = kNextPair ? column(a + a_k) : none;
        pairs = vcombine_u32(vzip1_u32(first, second), vzip2_u32(first, second));
    }
    return vreinterpretq_bf16_u32(pairs);
}

// Adds the products of two pairs, or of the last one. block[r][n]: rows 2r and 2r + 1, columns 4n, 4n + 1 and 4n + 2, 4n + 3.
template <int M, int NV, bool kNextPair>
FLASH_INLINE void add_two_pairs(const Product<Pair>& p, const Pair* a, const Pair* b, F32 (&block)[(M + 1) / 2][NV][2]) {
    bfloat16x8_t rows[(M + 1) / 2];
    FLASH_UNROLL
    for (int m = 0; m < M; m += 2)
        rows[m / 2] = m + 1 < M ? load_two_rows<true, kNextPair>(a + m * p.a_m, p.a_m, p.a_k)
                                : load_two_rows<false, kNextPair>(a + m * p.a_m, p.a_m, p.a_k);
    FLASH_UNROLL
    for (int n = 0; n < NV; ++n) {
        const U32 first = load_b(b + n * 4), second = kNextPair ? load_b(b + p.b_k + n * 4) : U32{};
        const bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
        const bfloat16x8_t high = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
        FLASH_UNROLL
        for (int r = 0; r < (M + 1) / 2; ++r) {
            block[r][n][0] = vbfmmlaq_f32(block[r][n][0], rows[r], low);
            block[r][n][1] = vbfmmlaq_f32(block[r][n][1], rows[r], high);
        }
    }
}

template <int M, int NV>
FLASH_INLINE void add_products(const Product<Pair>& p, const Pair* a, const Pair* b, F32 (&sum)[M][NV]) {
    F32 block[(M + 1) / 2][NV][2] = {};
    int64_t k = p.k;
    // The layout of A is tested once, not in every step.
    if (p.a_k == 1) {
        Product<Pair> q = p;
        q.a_k = 1;
        for (; k >= 2; k -= 2, a += 2, b += 2 * p.b_k) add_two_pairs<M, NV, true>(q, a, b, block);
    } else {
        for (; k >= 2; k -= 2, a += 2 * p.a_k, b += 2 * p.b_k) add_two_pairs<M, NV, true>(p, a, b, block);
    }
    if (k > 0) add_two_pairs<M, NV, false>(p, a, b, block);
    FLASH_UNROLL
    for (int m = 0; m < M; ++m) {
        FLASH_UNROLL
        for (int n = 0; n < NV; ++n) {
            const float64x2_t low = vreinterpretq_f64_f32(block[m / 2][n][0]), high = vreinterpretq_f64_f32(block[m / 2][n][1]);
            sum[m][n] = vreinterpretq_f32_f64(m % 2 ? vzip2q_f64(low, high) : vzip1q_f64(low, high));
        }
    }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
