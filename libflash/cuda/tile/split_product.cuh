// Products of float matrices with tf32 instructions, at the accuracy of floats. Each value is split into two tf32 numbers, high + low; of the four
// products of the parts all but low * low are made and added up in float (known as 3xTF32).
//
// The adders of the matrix unit cut off instead of rounding. So no sum is left in them for long: the small products have accumulators of their own,
// and after at most kHeadDim or 32 terms the sums are added with rounding to where they belong.
#pragma once

#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/tile/product.cuh"

namespace libflash::cuda {

constexpr uint32_t kTf32Mask = 0xffffe000u;

// Left operands: high is rounded to nearest, so that low has either sign and the missing low * low no preferred one.
__device__ __forceinline__ void split_left(uint32_t x, uint32_t& high, uint32_t& low) {
    high = (x + 0x1000u) & kTf32Mask;
    low = bits_of(float_of(x) - float_of(high));
}
// Right operands: the instruction itself cuts off the last bits of x, which leaves one subtraction.
__device__ __forceinline__ uint32_t low_of_right(uint32_t x) { return bits_of(float_of(x) - float_of(x & kTf32Mask)); }

// Fragments of 16 * kSlabs rows and 8 terms, split.
template <int kSlabs>
struct SplitRows {
    uint32_t high[kSlabs][4], low[kSlabs][4];

    __device__ __forceinline__ void split(const uint32_t (&x)[kSlabs][4]) {
#pragma unroll
        for (int i = 0; i < kSlabs * 4; ++i) split_left(x[i / 4][i % 4], high[i / 4][i % 4], low[i / 4][i % 4]);
    }
    // An accumulator block of each slab as left operand: its columns become terms, 2t number t and 2t + 1 number t + 4.
    __device__ __forceinline__ void split_columns(int slab, const float (&block)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) split_left(bits_of(block[e]), high[slab][e % 2 * 2 + e / 2], low[slab][e % 2 * 2 + e / 2]);
    }

    // One column block: large and small sums.
    __device__ __forceinline__ void multiply(float (&large)[4], float (&small)[4], int slab, const uint32_t (&x)[2],
                                             const uint32_t (&x_low)[2]) const {
        mma_m16n8k8(small, low[slab], x[0], x[1]);
        mma_m16n8k8(small, high[slab], x_low[0], x_low[1]);
        mma_m16n8k8(large, high[slab], x[0], x[1]);
    }
};

// c = A B: few column blocks and many terms, 8 a step; those past `terms` are known to be zero. load_a(step, fragments of all slabs), load_b(step,
// pair, the fragments of column blocks 2 * pair and 2 * pair + 1); kAhead: fragments of A are loaded a step before their use.
template <bool kAhead, int kSteps, int kSlabs, int kBlocks, class LoadA, class LoadB>
__device__ __forceinline__ void split_product(float (&c)[kSlabs][kBlocks][4], int terms, const LoadA& load_a,
                                              const LoadB& load_b) {
    constexpr int kPairs = kBlocks / 2, kTogether = 4;  // steps of one turn of the loop
    static_assert(kBlocks % 2 == 0 && kSteps % kTogether == 0, "column blocks come in pairs, steps in fours");
    float small[kSlabs][kBlocks][4];
    clear(c);
    clear(small);
    uint32_t a[kSlabs][4], b[2][4];
    if (kAhead) load_a(0, a);
    load_b(0, 0, b[0]);
#pragma unroll 1
    for (int first = 0; first < kSteps && first * 8 < terms; first += kTogether) {
        const bool more = first + kTogether < kSteps && (first + kTogether) * 8 < terms;
        SplitRows<kSlabs> rows;
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
                for (int s = 0; s < kSlabs; ++s) rows.multiply(c[s][2 * pair + half], small[s][2 * pair + half], s, high, low);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kSlabs * kBlocks * 4; ++i)
        c[i / (kBlocks * 4)][i / 4 % kBlocks][i % 4] += small[i / (kBlocks * 4)][i / 4 % kBlocks][i % 4];
}

// c += A B: few terms, 8 a step, with A in registers, and many column blocks, of which those past `cols` are left out. load_b(step, block, its
// fragment); kAhead: a block before its use.
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
        // Also keeps the compiler from beginning with all blocks at once, for which there are no registers.
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
