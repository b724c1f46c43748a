// Products of bf16 pairs with the matrix instruction BFMMLA of Arm: two rows of A times two columns of B, summed over two pairs.
// It computes four times as many products as an instruction on floats. The operands have the layouts of gemm.h; columns of B are
// interleaved once for all register tiles that use them. Included by gemm.h.
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

// The operand of rows m and m + 1 for pairs k and k + 1: (m, k), (m, k + 1), (m + 1, k), (m + 1, k + 1). Without kNextRow row m
// stands for row m + 1; without kNextPair pair k + 1 is 0. In memory, neighbours are pairs of a row (a_k = 1) or of a column
// (a_m = 1).
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

// Columns of B for two pairs, interleaved: half 0 has columns 4n and 4n + 1, half 1 the next two.
template <bool kNextPair>
FLASH_INLINE bfloat16x8_t interleave(const Pair* b, int64_t b_k, int half) {
    const U32 first = load_b(b), second = kNextPair ? load_b(b + b_k) : U32{};
    return vreinterpretq_bf16_u32(half ? vzip2q_u32(first, second) : vzip1q_u32(first, second));
}

// Where a register tile's columns are: in B, or interleaved once for all register tiles with these columns.
template <int NV>
struct ColumnsInPlace {
    const Pair* b;
    int64_t b_k;
    template <bool kNextPair>
    FLASH_INLINE bfloat16x8_t load(int n, int half) const {
        return interleave<kNextPair>(b + n * 4, b_k, half);
    }
    FLASH_INLINE void advance() { b += 2 * b_k; }
};
template <int NV>
struct InterleavedColumns {
    const bfloat16x8_t* at;
    template <bool kNextPair>
    FLASH_INLINE bfloat16x8_t load(int n, int half) const {
        return at[2 * n + half];
    }
    FLASH_INLINE void advance() { at += 2 * NV; }
};

// Adds the products of two pairs, or of the last one. block[r][n]: rows 2r and 2r + 1, columns 4n, 4n + 1 and 4n + 2, 4n + 3.
template <int M, int NV, bool kNextPair, class Columns>
FLASH_INLINE void add_two_pairs(const bfloat16x8_t (&rows)[(M + 1) / 2], const Columns& columns,
                                F32 (&block)[(M + 1) / 2][NV][2]) {
    FLASH_UNROLL
    for (int n = 0; n < NV; ++n) {
        const bfloat16x8_t low = columns.template load<kNextPair>(n, 0), high = columns.template load<kNextPair>(n, 1);
        FLASH_UNROLL
        for (int r = 0; r < (M + 1) / 2; ++r) {
            block[r][n][0] = vbfmmlaq_f32(block[r][n][0], rows[r], low);
            block[r][n][1] = vbfmmlaq_f32(block[r][n][1], rows[r], high);
        }
    }
}

// The operands of all rows of a register tile for two pairs.
template <int M, bool kNextPair>
FLASH_INLINE void load_rows(const Pair* a, int64_t a_m, int64_t a_k, bfloat16x8_t (&rows)[(M + 1) / 2]) {
    FLASH_UNROLL
    for (int m = 0; m < M; m += 2)
        rows[m / 2] = m + 1 < M ? load_two_rows<true, kNextPair>(a + m * a_m, a_m, a_k)
                                : load_two_rows<false, kNextPair>(a + m * a_m, a_m, a_k);
}

// load_rows() with loads of whole vectors: four pairs of each row (a_k = 1; operands for two steps), or one pair of each of four
// rows (a_m = 1).
FLASH_INLINE uint32x4_t load_four_pairs(const Pair* p) {
    uint32x4_t pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return pairs;
}
template <int M>
FLASH_INLINE void load_rows_of_four_pairs(const Pair* a, int64_t a_m, bfloat16x8_t (&first)[M / 2],
                                          bfloat16x8_t (&second)[M / 2]) {
    FLASH_UNROLL
    for (int m = 0; m < M; m += 2) {
        const uint64x2_t row = vreinterpretq_u64_u32(load_four_pairs(a + m * a_m));
        const uint64x2_t next = vreinterpretq_u64_u32(load_four_pairs(a + (m + 1) * a_m));
        first[m / 2] = vreinterpretq_bf16_u64(vzip1q_u64(row, next));
        second[m / 2] = vreinterpretq_bf16_u64(vzip2q_u64(row, next));
    }
}
template <int M>
FLASH_INLINE void load_four_rows_at_once(const Pair* a, int64_t a_k, bfloat16x8_t (&rows)[M / 2]) {
    FLASH_UNROLL
    for (int m = 0; m < M; m += 4) {
        const uint32x4_t first = load_four_pairs(a + m), second = load_four_pairs(a + m + a_k);
        rows[m / 2] = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
        rows[m / 2 + 1] = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
    }
}

template <int M, int NV, class Columns>
FLASH_INLINE void add_blocks(const Product<Pair>& p, const Pair* a, Columns columns, F32 (&block)[(M + 1) / 2][NV][2]) {
    int64_t k = p.k;
    bfloat16x8_t rows[(M + 1) / 2];
    // The layout of A is tested once, not in every step: a_k or a_m is 1.
    if (p.a_k == 1) {
        if constexpr (M % 2 == 0) {
            bfloat16x8_t next_rows[M / 2];
            for (; k >= 4; k -= 4, a += 4) {
                load_rows_of_four_pairs<M>(a, p.a_m, rows, next_rows);
                add_two_pairs<M, NV, true>(rows, columns, block);
                columns.advance();
                add_two_pairs<M, NV, true>(next_rows, columns, block);
                columns.advance();
            }
        }
        for (; k >= 2; k -= 2, a += 2, columns.advance()) {
            load_rows<M, true>(a, p.a_m, 1, rows);
            add_two_pairs<M, NV, true>(rows, columns, block);
        }
    } else {
        for (; k >= 2; k -= 2, a += 2 * p.a_k, columns.advance()) {
            if constexpr (M % 4 == 0)
                load_four_rows_at_once<M>(a, p.a_k, rows);
            else
                load_rows<M, true>(a, p.a_m, p.a_k, rows);
            add_two_pairs<M, NV, true>(rows, columns, block);
        }
    }
    if (k == 0) return;
    load_rows<M, false>(a, p.a_m, p.a_k, rows);
    add_two_pairs<M, NV, false>(rows, columns, block);
}

template <int M, int NV>
FLASH_INLINE void add_products(const Product<Pair>& p, const Pair* a, const Pair* b, F32 (&sum)[M][NV]) {
    F32 block[(M + 1) / 2][NV][2] = {};
    if (p.interleaved)
        add_blocks<M, NV>(p, a, InterleavedColumns<NV>{static_cast<const bfloat16x8_t*>(p.interleaved)}, block);
    else
        add_blocks<M, NV>(p, a, ColumnsInPlace<NV>{b, p.b_k}, block);
    FLASH_UNROLL
    for (int m = 0; m < M; ++m) {
        FLASH_UNROLL
        for (int n = 0; n < NV; ++n) {
            const float64x2_t low = vreinterpretq_f64_f32(block[m / 2][n][0]), high = vreinterpretq_f64_f32(block[m / 2][n][1]);
            sum[m][n] = vreinterpretq_f32_f64(m % 2 ? vzip2q_f64(low, high) : vzip1q_f64(low, high));
        }
    }
}

constexpr int64_t kMostInterleavedPairs = 256;  // 16 KB of stack

template <int NV>
static void interleave_columns(const Product<Pair>& p, int64_t n0, bfloat16x8_t* to) {
    const Pair* b = p.b + n0;
    int64_t k = p.k;
    for (; k >= 2; k -= 2, b += 2 * p.b_k) {
        FLASH_UNROLL
        for (int n = 0; n < 2 * NV; ++n) *to++ = interleave<true>(b + n / 2 * 4, p.b_k, n % 2);
    }
    if (k == 0) return;
    FLASH_UNROLL
    for (int n = 0; n < 2 * NV; ++n) *to++ = interleave<false>(b + n / 2 * 4, p.b_k, n % 2);
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
