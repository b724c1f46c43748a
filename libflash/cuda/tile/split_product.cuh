// Products of float matrices by tf32 instructions, with the accuracy of float (3xTF32). Each value is split into two tf32
// numbers, high + low; of the four products of these parts all but low * low are computed and added in float.
//
// The adders of the tensor cores truncate instead of rounding. Therefore the small products have separate accumulators, and after
// at most 256 terms of Q K^T or 32 terms of P V the accumulators are added to the result by rounding additions.
#pragma once

#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/tile/product.cuh"

namespace libflash::cuda {

constexpr uint32_t kTf32Mask = 0xffffe000u;

// A operands: high is rounded to nearest, so that low has either sign and the omitted product low * low is unbiased.
__device__ __forceinline__ void split_left(uint32_t x, uint32_t& high, uint32_t& low) {
    high = (x + 0x1000u) & kTf32Mask;
    low = bits_of(float_of(x) - float_of(high));
}
// B operands: the instruction itself truncates x to high, so only low has to be computed, by one subtraction.
__device__ __forceinline__ uint32_t low_of_right(uint32_t x) { return bits_of(float_of(x) - float_of(x & kTf32Mask)); }

// A fragments of 16 * kSlabs rows and 8 terms, split.
template <int kSlabs>
struct SplitRows {
    uint32_t high[kSlabs][4], low[kSlabs][4];

    __device__ __forceinline__ void split(const uint32_t (&x)[kSlabs][4]) {
#pragma unroll
        for (int i = 0; i < kSlabs * 4; ++i) split_left(x[i / 4][i % 4], high[i / 4][i % 4], low[i / 4][i % 4]);
    }
    // Takes an accumulator block of a slab as A operand: column 2t becomes term t, and column 2t + 1 term t + 4.
    __device__ __forceinline__ void split_columns(int slab, const float (&block)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) split_left(bits_of(block[e]), high[slab][e % 2 * 2 + e / 2], low[slab][e % 2 * 2 + e / 2]);
    }

    // Multiplies one column block, with separate sums of large and small products.
    __device__ __forceinline__ void multiply(float (&large)[4], float (&small)[4], int slab, const uint32_t (&x)[2],
                                             const uint32_t (&x_low)[2]) const {
        mma_m16n8k8(small, low[slab], x[0], x[1]);
        mma_m16n8k8(small, high[slab], x_low[0], x_low[1]);
        mma_m16n8k8(large, high[slab], x[0], x[1]);
    }
};

// c += x.
template <int kSlabs, int kBlocks>
__device__ __forceinline__ void add_elements(float (&c)[kSlabs][kBlocks][4], const float (&x)[kSlabs][kBlocks][4]) {
#pragma unroll
    for (int i = 0; i < kSlabs * kBlocks * 4; ++i)
        c[i / (kBlocks * 4)][i / 4 % kBlocks][i % 4] += x[i / (kBlocks * 4)][i / 4 % kBlocks][i % 4];
}

// c = A B with few column blocks and many terms, 8 per step; terms from `terms` on are known to be zero. load_a(step, fragments
// of all slabs); load_b(step, pair, fragments of column blocks 2 * pair and 2 * pair + 1). kAhead: fragments of A are loaded
// one step before their use. kShortSums: the accumulators of the large products are added to c after every 32 terms, which needs
// registers for them. Forward and backward of the same problem must agree in this: if one loses more by truncation than the
// other, the difference is an error of one sign in all of P.
template <bool kAhead, int kSteps, bool kShortSums = false, int kSlabs, int kBlocks, class LoadA, class LoadB>
__device__ __forceinline__ void split_product(float (&c)[kSlabs][kBlocks][4], int terms, const LoadA& load_a,
                                              const LoadB& load_b) {
    constexpr int kPairs = kBlocks / 2, kTogether = 4;  // steps per iteration of the loop
    static_assert(kBlocks % 2 == 0 && kSteps % kTogether == 0, "column blocks come in pairs, steps in fours");
    float large[kSlabs][kBlocks][4], small[kSlabs][kBlocks][4];
    clear(c);
    clear(small);
    uint32_t a[kSlabs][4], b[2][4];
    if (kAhead) load_a(0, a);
    load_b(0, 0, b[0]);
#pragma unroll 1
    for (int first = 0; first < kSteps && first * 8 < terms; first += kTogether) {
        const bool more = first + kTogether < kSteps && (first + kTogether) * 8 < terms;
        SplitRows<kSlabs> rows;
        if (kShortSums) clear(large);
#pragma unroll
        for (int t = 0; t < kTogether * kPairs; ++t) {
            const int step = t / kPairs, pair = t % kPairs;
            if (pair == 0) {
                if (!kAhead) load_a(first + step, a);
                rows.split(a);
                if (kAhead && (step + 1 < kTogether || more)) load_a(first + step + 1, a);
            }
            if (t + 1 < kTogether * kPairs || more) load_b(first + (t + 1) / kPairs, (t + 1) % kPairs, b[(t + 1) % 2]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t high[2] = {b[t % 2][2 * half], b[t % 2][2 * half + 1]};
                const uint32_t low[2] = {low_of_right(high[0]), low_of_right(high[1])};
#pragma unroll
                for (int s = 0; s < kSlabs; ++s)
                    rows.multiply((kShortSums ? large : c)[s][2 * pair + half], small[s][2 * pair + half], s, high, low);
            }
        }
        if (kShortSums) add_elements(c, large);
    }
    add_elements(c, small);
}

// c += A B with few terms, 8 per step, A in registers, and many column blocks; blocks from column `cols` on are skipped.
// load_b(step, block, fragment). kAhead: a fragment is loaded one block before its use.
template <bool kAhead, int kSteps, int kSlabs, int kBlocks, class LoadB>
__device__ __forceinline__ void add_split_product(float (&c)[kSlabs][kBlocks][4], const SplitRows<kSlabs> (&a)[kSteps], int cols,
                                                  const LoadB& load_b) {
    uint32_t b[2][kSteps][2];
    if constexpr (kAhead) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) load_b(step, 0, b[0][step]);
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
        // This branch also keeps the compiler from starting all blocks at once, which would need too many registers.
        if (n % (kSlabs > 1 ? 2 : 4) == 0 && n * 8 >= cols) break;
        float large[kSlabs][1][4], small[kSlabs][1][4];
        clear(large);
        clear(small);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (!kAhead) load_b(step, n, b[n % 2][step]);
            if (kAhead && n + 1 < kBlocks) load_b(step, n + 1, b[(n + 1) % 2][step]);
            const uint32_t (&high)[2] = b[n % 2][step];
            const uint32_t low[2] = {low_of_right(high[0]), low_of_right(high[1])};
#pragma unroll
            for (int s = 0; s < kSlabs; ++s) a[step].multiply(large[s][0], small[s][0], s, high, low);
        }
#pragma unroll
        for (int i = 0; i < kSlabs * 4; ++i) c[i / 4][n][i % 4] += large[i / 4][0][i % 4] + small[i / 4][0][i % 4];
    }
}

}  // namespace libflash::cuda
