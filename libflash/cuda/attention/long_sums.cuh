// Long sums on the device (long_sums.h explains the purpose): each thread has its own floats in the workspace of its thread
// block, so that threads need no synchronisation. The sums are relative to the kept maximum at the time of writing, and are
// rescaled when the kept maximum has changed.
#pragma once

#include "cuda/attention/long_sums.h"
#include "cuda/attention/online_softmax.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"

namespace libflash::cuda {

// kThreads: threads of the thread block that have accumulators. A thread has kSlabs slabs of two rows r with kBlocks accumulator
// blocks of four elements each (tile/accumulator.cuh): elements 2 * r and 2 * r + 1 of a block belong to row r. `thread`: the
// number of this thread. kBlockByBlock: the compiler may not load further blocks before the current ones are finished, which
// takes registers.
template <int kThreads, int kSlabs, int kBlocks, bool kBlockByBlock = false>
struct LongSums {
    static constexpr int kVectors = kBlocks + 2;          // of a slab
    static constexpr int kAtOnce = kBlocks > 24 ? 1 : 4;  // loads that are in flight together; they take registers
    float4* own;

    __device__ __forceinline__ LongSums(float* workspace, int thread)
        : own(reinterpret_cast<float4*>(workspace) + int64_t{blockIdx.x} * (kSlabs * kVectors * kThreads) + thread) {}

    // Marks that there are no sums yet.
    __device__ __forceinline__ void clear() const {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a) state(a) = make_float4(0.0f, 0.0f, kNone, 0.0f);
    }

    // Adds the accumulators of slab a and its row sums, which are relative to `maximum`, to the sums, and sets them to 0.
    // block(n): the four elements of block n. The row sums are not computed by tensor cores, but they must be set to 0, too:
    // otherwise they would exceed kSumLimit after many keys, and probabilities would become so small that `half` represents them
    // with fewer bits.
    template <class Block>
    __device__ __forceinline__ void take(int a, const Block& block, float (&row_sum)[2], const float (&maximum)[2]) const {
        const float4 before = state(a);
        const bool exists = before.z == kTaken;
        // Not computed from an uninitialised state, which could give infinity.
        const float factor[2] = {exists ? exp2_approx(before.x - maximum[0]) : 0.0f,
                                 exists ? exp2_approx(before.y - maximum[1]) : 0.0f};
        state(a) = make_float4(maximum[0], maximum[1], kTaken, 0.0f);
        float4 sums = exists ? row_sums(a) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        scale_row_sum(sums.x, factor[0]);
        scale_row_sum(sums.y, factor[1]);
        row_sums(a) = make_float4(sums.x + row_sum[0], sums.y + row_sum[1], 0.0f, 0.0f);
        row_sum[0] = row_sum[1] = 0.0f;
        for_blocks(
            a, [&](float4* from, float4& sum) { sum = exists ? *from : make_float4(0.0f, 0.0f, 0.0f, 0.0f); },
            [&](float4* to, int n, const float4& sum) {
                float* x = block(n);
                *to = make_float4(fmaf(sum.x, factor[0], x[0]), fmaf(sum.y, factor[0], x[1]), fmaf(sum.z, factor[1], x[2]),
                                  fmaf(sum.w, factor[1], x[3]));
                x[0] = x[1] = x[2] = x[3] = 0.0f;
            });
    }

    // Called when all scores of the rows are complete: adds to the row sums, and computes the factors for add(). Loads one number
    // at a time, because the callers have few free registers.
    __device__ __forceinline__ void finish(int a, float (&row_sum)[2], const float (&maximum)[2]) const {
        float* const word = reinterpret_cast<float*>(&state(a));
        if (word[2] != kTaken) return;
        word[2] = kFinished;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float* const own_word = hide_from_compiler(word) + r;
            const float factor = exp2_approx(*own_word - maximum[r]);
            *own_word = factor;
            float sum = own_word[4 * kThreads];  // row_sums()
            scale_row_sum(sum, factor);
            row_sum[r] += sum;
        }
    }
    // Whether there are sums to be added.
    __device__ __forceinline__ bool has_finished(int a) const { return state(a).z == kFinished; }
    // Adds the sums to the accumulators. Afterwards there are no sums.
    template <class Block>
    __device__ __forceinline__ void add(int a, const Block& block) const {
        const float4 factors = state(a);
        state(a).z = kNone;
        for_blocks(
            a, [](float4* from, float4& sum) { sum = *from; },
            [&](float4*, int n, const float4& sum) {
                float* x = block(n);
                x[0] = fmaf(sum.x, factors.x, x[0]), x[1] = fmaf(sum.y, factors.x, x[1]);
                x[2] = fmaf(sum.z, factors.y, x[2]), x[3] = fmaf(sum.w, factors.y, x[3]);
            });
    }

private:
    // Values of element 2 of the state. Elements 0 and 1 are the maxima that the sums are relative to (kTaken) or the factors
    // (kFinished).
    static constexpr float kNone = 0.0f, kTaken = 1.0f, kFinished = 2.0f;
    __device__ __forceinline__ float4& state(int a) const { return own[a * kVectors * kThreads]; }
    __device__ __forceinline__ float4& row_sums(int a) const { return own[(a * kVectors + 1) * kThreads]; }

    // Calls load(sums, sum) for kAtOnce blocks n of slab a, then use(sums, n, sum) for the same blocks.
    template <class Load, class Use>
    __device__ __forceinline__ void for_blocks(int a, const Load& load, const Use& use) const {
#pragma unroll
        for (int first = 0; first < kBlocks; first += kAtOnce) {
            if (kBlockByBlock) __syncwarp();  // the compiler moves no loads across it
            float4* const sums = hide_from_compiler(own + (a * kVectors + 2 + first) * kThreads);
            float4 sum[kAtOnce];
#pragma unroll
            for (int n = first; n < first + kAtOnce && n < kBlocks; ++n) load(sums + (n - first) * kThreads, sum[n - first]);
#pragma unroll
            for (int n = first; n < first + kAtOnce && n < kBlocks; ++n) use(sums + (n - first) * kThreads, n, sum[n - first]);
        }
    }
};

}  // namespace libflash::cuda
