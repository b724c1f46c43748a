// The cost of split-K: warps that share the keys of a tile have partial sums, which are added in shared memory, 64 channels at a
// time. Every float is written once and read once, with a barrier of the thread block between.
#pragma once

#include <cstdint>

namespace baselines::BASELINE_TYPE {

constexpr int kChannels = 64;

template <int kRows, int kWarps>
struct PartialSums {
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kStride = kChannels + 8;  // floats per row: the stores and loads below have no bank conflicts
    static constexpr int kBytes = kWarps * kRows * kStride * 4;
    // A thread adds up two quads of channels in each of its rows: 8 threads a row.
    static constexpr int kRowsAtOnce = kThreads / 8;
    static constexpr int kPasses = kRows / kRowsAtOnce;
    static_assert(kPasses * kRowsAtOnce == kRows && kPasses > 0, "every thread has as many rows");

    __device__ static __forceinline__ int row_of(int pass, int thread) { return pass * kRowsAtOnce + thread / 8; }
    __device__ static __forceinline__ int channel_of(int quad, int thread) { return quad * 32 + thread % 8 * 4; }

    template <int kBlocks>
    __device__ static __forceinline__ void store(float* shared, int warp, int lane, const float (&c)[kRows / 16][kBlocks][4]) {
#pragma unroll
        for (int a = 0; a < kRows / 16; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float* row = shared + (warp * kRows + a * 16 + r * 8 + lane / 4) * kStride + lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < kBlocks; ++n)
                    *reinterpret_cast<float2*>(row + n * 8) = make_float2(c[a][n][2 * r], c[a][n][2 * r + 1]);
            }
    }

    // sum += factor(warp) * partial sum of the warp, for all warps.
    template <class Factor>
    __device__ static __forceinline__ void add(float4& sum, const float* shared, int pass, int quad, int thread,
                                               const Factor& factor) {
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            const float4 part = *reinterpret_cast<const float4*>(shared + (warp * kRows + row_of(pass, thread)) * kStride +
                                                                 channel_of(quad, thread));
            const float f = factor(warp);
            sum.x += f * part.x;
            sum.y += f * part.y;
            sum.z += f * part.z;
            sum.w += f * part.w;
        }
    }
};

}  // namespace baselines::BASELINE_TYPE
