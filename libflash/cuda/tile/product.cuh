// A warp's product of two matrices in 16-bit fragments: c += A B, 16 columns of A at a time. Where the fragments come from, shared memory or
// registers, the two callables know.
#pragma once

#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma_sync.cuh"

namespace libflash::cuda {

// c[a][n]: accumulator blocks of 16 rows and 8 columns. load_a(step, fragments of all slabs); load_b(step, pair, fragments of column blocks
// 2 * pair and 2 * pair + 1). Fragments are loaded one product ahead of their use.
template <class T, int kSteps, int kSlabs, int kBlocks, class LoadA, class LoadB>
__device__ __forceinline__ void add_product(float (&c)[kSlabs][kBlocks][4], const LoadA& load_a, const LoadB& load_b) {
    constexpr int kPairs = kBlocks / 2;
    static_assert(kBlocks % 2 == 0, "column blocks come in pairs");
    uint32_t af[2][kSlabs][4], bf[2][4];
    load_a(0, af[0]);
    load_b(0, 0, bf[0]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            const int t = step * kPairs + pair;
            if (t + 1 < kSteps * kPairs) load_b((t + 1) / kPairs, (t + 1) % kPairs, bf[(t + 1) % 2]);
            if (pair == 0 && step + 1 < kSteps) load_a(step + 1, af[(step + 1) % 2]);
#pragma unroll
            for (int a = 0; a < kSlabs; ++a) {
                mma_m16n8k16(c[a][2 * pair], af[step % 2][a], bf[t % 2][0], bf[t % 2][1], T());
                mma_m16n8k16(c[a][2 * pair + 1], af[step % 2][a], bf[t % 2][2], bf[t % 2][3], T());
            }
        }
    }
}

template <int kSlabs, int kBlocks>
__device__ __forceinline__ void clear(float (&c)[kSlabs][kBlocks][4]) {
#pragma unroll
    for (int a = 0; a < kSlabs; ++a)
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) c[a][n][e] = 0.0f;
}

// Two neighbouring accumulator blocks, rounded, are a fragment of A.
template <class T>
__device__ __forceinline__ void to_fragment(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_pair(left[0], left[1], T());
    a[1] = pack_pair(left[2], left[3], T());
    a[2] = pack_pair(right[0], right[1], T());
    a[3] = pack_pair(right[2], right[3], T());
}

}  // namespace libflash::cuda
