// Warps that share 16 rows and each have a part of the channels add their parts of two tiles of scores through shared memory.
#pragma once

#include <cstdint>

#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"

namespace libflash::cuda::sm80 {

// kBlocks: blocks of 8 columns of a tile of scores.
template <int kParts, int kThreads, int kBlocks>
struct ScoreParts {
    using Scores = float[1][kBlocks][4];
    static constexpr int kBytes = 2 * kBlocks * kThreads * 16;

    uint32_t memory;  // address of kBytes in shared memory
    int thread;

    // The address of vector i of a thread. The vectors i of all threads are contiguous.
    __device__ __forceinline__ uint32_t address_of(int of_thread, int i) const {
        return memory + (i * kThreads + of_thread) * 16;
    }

    // Both tiles become the sums over all parts. All warps add in the same order. Called by all threads; begins with a barrier,
    // after which no warp reads what the memory held. The caller needs a barrier before it overwrites the memory.
    __device__ __forceinline__ void add(Scores& a, Scores& b) const {
        const int me = hide_from_compiler(thread), first = me / (kParts * 32) * (kParts * 32) + me % 32;
        __syncthreads();
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
            store_shared_16(address_of(me, n), a[0][n][0], a[0][n][1], a[0][n][2], a[0][n][3]);
            store_shared_16(address_of(me, kBlocks + n), b[0][n][0], b[0][n][1], b[0][n][2], b[0][n][3]);
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
            sum_parts(a[0][n], first, n);
            sum_parts(b[0][n], first, kBlocks + n);
        }
    }
    __device__ __forceinline__ void sum_parts(float (&c)[4], int first, int i) const {
        c[0] = c[1] = c[2] = c[3] = 0.0f;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const float4 x = load_shared_16(address_of(first + part * 32, i));
            c[0] += x.x, c[1] += x.y, c[2] += x.z, c[3] += x.w;
        }
    }
};

}  // namespace libflash::cuda::sm80
