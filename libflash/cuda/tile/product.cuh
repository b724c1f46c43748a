// A matrix product of one warp in 16-bit fragments: c += A B, 16 columns of A per step. Two callables load the fragments, from
// shared memory or registers.
#pragma once

#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma_sync.cuh"

namespace libflash::cuda {

// load_a(step, fragments of all slabs of 16 rows); load_b(step, pair, fragments of column blocks 2 * pair and 2 * pair + 1).
// Fragments of B are loaded kAhead pairs before their use, fragments of A one step before.
template <class T, int kSteps, int kAhead, int kSlabs, int kBlocks, class LoadA, class LoadB>
struct Product {
    static_assert(kBlocks % 2 == 0, "column blocks come in pairs");
    static constexpr int kPairs = kBlocks / 2, kAll = kSteps * kPairs;
    const LoadA load_a;
    const LoadB load_b;
    uint32_t af[2][kSlabs][4], bf[kAhead + 1][4];

    __device__ __forceinline__ Product(const LoadA& a, const LoadB& b) : load_a(a), load_b(b) {}

    // Loads the first fragments; best called while another product is in progress.
    __device__ __forceinline__ void start() {
        load_a(0, af[0]);
#pragma unroll
        for (int t = 0; t < kAhead && t < kAll; ++t) load_b(t / kPairs, t % kPairs, bf[t]);
    }

    // Called after start(). c[a][n]: accumulator blocks of 16 rows and 8 columns. between(step) is called before each step, so
    // that callers can interleave other work.
    template <class Between>
    __device__ __forceinline__ void add_to(float (&c)[kSlabs][kBlocks][4], const Between& between) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            between(step);
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
                const int t = step * kPairs + pair, next = t + kAhead;
                if (pair == 0 && step + 1 < kSteps) load_a(step + 1, af[(step + 1) % 2]);
                if (next < kAll) load_b(next / kPairs, next % kPairs, bf[next % (kAhead + 1)]);
                const uint32_t (&b)[4] = bf[t % (kAhead + 1)];
#pragma unroll
                for (int a = 0; a < kSlabs; ++a) {
                    mma_m16n8k16(c[a][2 * pair], af[step % 2][a], b[0], b[1], T());
                    mma_m16n8k16(c[a][2 * pair + 1], af[step % 2][a], b[2], b[3], T());
                }
            }
        }
    }
};

template <class T, int kSteps, int kAhead, int kSlabs, int kBlocks, class LoadA, class LoadB>
__device__ __forceinline__ Product<T, kSteps, kAhead, kSlabs, kBlocks, LoadA, LoadB> make_product(const LoadA& a,
                                                                                                  const LoadB& b) {
    return {a, b};
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

// Two neighbouring accumulator blocks, rounded, form a fragment of A.
template <class T>
__device__ __forceinline__ void to_fragment(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_pair(left[0], left[1], T());
    a[1] = pack_pair(left[2], left[3], T());
    a[2] = pack_pair(right[0], right[1], T());
    a[3] = pack_pair(right[2], right[3], T());
}

}  // namespace libflash::cuda
