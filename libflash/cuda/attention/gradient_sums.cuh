// Sums of dK and dV over several launches (attention/long_sums.h): each thread has its own floats in the workspace of its thread
// block, so that threads need no synchronisation.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/ptx/hide_from_compiler.cuh"

namespace libflash::cuda {

// The sums of one gradient: kThreads threads of the thread block hold kVectors times four accumulators each. `thread`: the number
// of this thread among them.
template <int kThreads, int kVectors>
struct GradientSums {
    const BackwardPart& part;
    float4* own;

    // gradient: 0 for dV, 1 for dK. block: number of the thread block in its launch, the same in all launches of a key tile.
    __device__ __forceinline__ GradientSums(const BackwardPart& of_launch, int block, int gradient, int thread)
        : part(of_launch),
          own(reinterpret_cast<float4*>(part.sums) + (int64_t{block} * 2 + gradient) * (kVectors * kThreads) + thread) {}

    // Adds the sums of earlier launches to the accumulators; vector(n): four accumulators. Returns true if this launch is the
    // last launch of the key tile; otherwise keeps the sums for the next launch.
    template <class Vector>
    __device__ __forceinline__ bool add_parts(const Vector& vector) const {
        if (!part.sums) return true;
        float4* const sums = hide_from_compiler(own);
        if (!part.first) {
#pragma unroll
            for (int n = 0; n < kVectors; ++n) {
                const float4 sum = sums[n * kThreads];
                float* const x = vector(n);
                x[0] += sum.x, x[1] += sum.y, x[2] += sum.z, x[3] += sum.w;
            }
        }
        if (part.last) return true;
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
            const float* const x = vector(n);
            sums[n * kThreads] = make_float4(x[0], x[1], x[2], x[3]);
        }
        return false;
    }
};

}  // namespace libflash::cuda
