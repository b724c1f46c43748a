// The sums of dK and dV of a split key tile: each split of the key tile writes its sums to the workspace, and the last one to do
// so adds those of all splits in their order, so the result has the same bits in every run. Each warp does this for its own rows
// with a counter of its own, so warps need no synchronisation. Thread i of a thread block reads what threads i of the others have
// written.
#pragma once

#include "cuda/attention/schedule.cuh"
#include "cuda/ptx/counter.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"

namespace libflash::cuda::sm90 {

// The sums of one gradient: kThreads threads of the thread block hold kVectors times four accumulators each.
template <int kThreads, int kVectors>
struct BackwardSplitSums {
    static constexpr int kWarps = kThreads / 32, kSlotVectors = 2 * kVectors * kThreads;  // float4s of dK and dV

    const SplitTilesParams& tiles;
    int number;    // of this split: those of a key tile follow each other
    int gradient;  // 0: dV, 1: dK
    int thread;    // number of this thread among kThreads

    // vector(n): four accumulators. Returns true in the last split; the accumulators then hold the sums of all splits.
    template <class Vector>
    __device__ __forceinline__ bool add(const Vector& vector) const {
        write(vector);
        const int key_tile = divide(number, tiles.splits);
        if (!is_last(key_tile)) return false;
        float4* const first = sums_of(key_tile * splits());
        read(first, [&](int n, const float4& sum) {
            float* const x = vector(n);
            x[0] = sum.x, x[1] = sum.y, x[2] = sum.z, x[3] = sum.w;
        });
#pragma unroll 1
        for (int i = 1; i < splits(); ++i) {
            read(first + i * kSlotVectors, [&](int n, const float4& sum) {
                float* const x = vector(n);
                x[0] += sum.x, x[1] += sum.y, x[2] += sum.z, x[3] += sum.w;
            });
        }
        return true;
    }

private:
    __device__ __forceinline__ int splits() const { return static_cast<int>(tiles.splits.divisor); }
    __device__ __forceinline__ float4* sums_of(int of_split) const {
        return reinterpret_cast<float4*>(tiles.sums) + of_split * kSlotVectors + gradient * (kVectors * kThreads) + thread;
    }
    template <class Vector>
    __device__ __forceinline__ void write(const Vector& vector) const {
        float4* const own = hide_from_compiler(sums_of(number));
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
            const float* const x = vector(n);
            own[n * kThreads] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
    template <class Use>
    __device__ __forceinline__ static void read(float4* from, const Use& use) {
        const float4* const sums = hide_from_compiler(from);
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
            if (n % 4 == 0) __syncwarp();  // the compiler moves no loads across it: there are no registers for more
            use(n, sums[n * kThreads]);
        }
    }
    // Whether all other splits of the key tile have written the sums of this warp's rows.
    __device__ __forceinline__ bool is_last(int key_tile) const {
        int* const counter = tiles.counters + (key_tile * 2 + gradient) * kWarps + thread / 32;
        __syncwarp();  // lane 0 releases what all lanes have written
        int before = 0;
        if (thread % 32 == 0) before = add_to_count(counter);
        before = __shfl_sync(0xffffffffu, before, 0);
        __syncwarp();  // makes visible to all lanes what lane 0 has acquired
        return before == splits() - 1;
    }
};

}  // namespace libflash::cuda::sm90
