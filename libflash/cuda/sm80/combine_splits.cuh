// The end of decode: from the results of several ranges of keys, each divided by its own sum, and their logsumexps to the output. A thread block
// a row of the output; its warps take the ranges in turn. A range without a key is not read, and a single one comes out as if
// nothing had been split, bit for bit.
#pragma once

#include "cuda/attention/decode_params.h"
#include "cuda/attention/scores.cuh"
#include "cuda/config.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm80/launch_behind.cuh"

namespace libflash::cuda::sm80 {

// Row of the workspace: `row` counts query rows, and in each the query heads of a key head.
__device__ __forceinline__ int64_t partial_row(const DecodeParams& p, int batch, int head_k, int row) {
    return (int64_t{batch} * p.heads_k + head_k) * (int64_t{p.seqlen_q} * p.group_size) + row;
}

// In base-2 units; -infinity: there is none.
template <class T>
__device__ __forceinline__ float sink_of(const DecodeParams& p, int batch, int head) {
    return p.sink.data ? head_number<T>(p.sink, batch, head) * kLog2e : -INFINITY;
}

// Writes lse, all ranges together and the sink, and returns the weight of the ranges together.
__device__ __forceinline__ float finish_row(const DecodeParams& p, int batch, int row, int head, float ranges_lse, float sink) {
    const float largest = fmaxf(ranges_lse, sink);
    float weight = 0.0f, lse = -INFINITY;
    if (largest != -INFINITY || ranges_lse != ranges_lse) {
        weight = exp2_approx(ranges_lse - largest);
        const float total = weight + exp2_approx(sink - largest);
        weight /= total;
        lse = (largest + __log2f(total)) * kLn2;
    }
    if (p.lse.data) p.lse.data[batch * p.lse.batch + row * p.lse.row + head * p.lse.head] = lse;
    return weight;
}

template <class T>
__device__ __forceinline__ void store_pair(const DecodeParams& p, int batch, int row, int head, int channel, float2 x) {
    T* to = static_cast<T*>(p.out.data) + batch * p.out.batch + row * p.out.row + head * p.out.head + channel;
    struct alignas(2 * sizeof(T)) Pair {
        T low, high;
    };
    if (p.vector_out) {
        if (channel < p.head_dim_v) *reinterpret_cast<Pair*>(to) = {from_float(x.x, T()), from_float(x.y, T())};
    } else {
        if (channel < p.head_dim_v) to[0] = from_float(x.x, T());
        if (channel + 1 < p.head_dim_v) to[1] = from_float(x.y, T());
    }
}

template <class T, int kHeadDim>
struct CombineSplits {
    static constexpr int kWarps = 4, kThreads = kWarps * 32;
    static constexpr int kPairs = kHeadDim / 64;  // of channels, of a lane
    static constexpr int kInFlight = 8;

    const DecodeParams& params;
    const float *lse, *out;  // of the first range of the row
    int lane, warp;

    __device__ __forceinline__ CombineSplits(const DecodeParams& p, int64_t row)
        : params(p), lse(p.partial_lse + row * p.splits), out(p.partial_out + row * p.splits * kHeadDim), lane(threadIdx.x % 32),
          warp(threadIdx.x / 32) {}

    // The logsumexp of all ranges, in base-2 units; every warp finds it for itself.
    __device__ __forceinline__ float all_ranges() const {
        float largest = -INFINITY;
        bool bad = false;
        for (int n = lane; n < params.splits; n += 32) {
            const float x = lse[n];
            bad |= x != x;
            largest = fmaxf(largest, x);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        if (__any_sync(0xffffffffu, bad)) return NAN;
        if (largest == -INFINITY) return largest;
        float sum = 0.0f;
        for (int n = lane; n < params.splits; n += 32) sum += exp2_approx(lse[n] - largest);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        return largest + __log2f(sum);
    }

    __device__ __forceinline__ void add_ranges(float all, float weight, float2 (&sums)[kPairs]) const {
        for (int first = warp; first < params.splits; first += kWarps * kInFlight) {
            float2 x[kInFlight][kPairs];
            float factor[kInFlight];
#pragma unroll
            for (int j = 0; j < kInFlight; ++j) {
                const int n = first + j * kWarps;
                const float one = n < params.splits ? lse[n] : -INFINITY;
                factor[j] = one == -INFINITY ? 0.0f : exp2_approx(one - all) * weight;
#pragma unroll
                for (int c = 0; c < kPairs; ++c)
                    if (factor[j] != 0.0f)
                        x[j][c] = *reinterpret_cast<const float2*>(out + int64_t{n} * kHeadDim + c * 64 + lane * 2);
            }
#pragma unroll
            for (int j = 0; j < kInFlight; ++j)
#pragma unroll
                for (int c = 0; c < kPairs; ++c)
                    if (factor[j] != 0.0f) {
                        sums[c].x = fmaf(factor[j], x[j][c].x, sums[c].x);
                        sums[c].y = fmaf(factor[j], x[j][c].y, sums[c].y);
                    }
        }
    }

    __device__ __forceinline__ void run(int batch, int row, int head, float2 (*parts)[kPairs][32]) const {
        const float all = all_ranges();
        float weight = 0.0f;
        const float sink = sink_of<T>(params, batch, head);
        if (threadIdx.x < 32) weight = finish_row(params, batch, row, head, all, sink);  // all lanes write the same lse
        if (threadIdx.x == 0) *reinterpret_cast<float*>(parts) = weight;
        __syncthreads();
        weight = *reinterpret_cast<const float*>(parts);
        __syncthreads();
        float2 sums[kPairs] = {};
        add_ranges(all, weight, sums);
#pragma unroll
        for (int c = 0; c < kPairs; ++c) parts[warp][c][lane] = sums[c];
        __syncthreads();
        for (int i = threadIdx.x; i < kPairs * 32; i += kThreads) {
            float2 sum = parts[0][i / 32][i % 32];
#pragma unroll
            for (int w = 1; w < kWarps; ++w) sum.x += parts[w][i / 32][i % 32].x, sum.y += parts[w][i / 32][i % 32].y;
            store_pair<T>(params, batch, row, head, i * 2, sum);
        }
    }
};

template <class Row, class T>
__global__ void __launch_bounds__(128) combine_kernel(const __grid_constant__ DecodeParams params) {
    using Body = CombineSplits<T, Row::config.head_dim>;
    __shared__ float2 parts[Body::kWarps][Body::kPairs][32];
    const int rows = params.seqlen_q * params.group_size;
    const int packed = blockIdx.x % rows, head_k = blockIdx.x / rows % params.heads_k, batch = blockIdx.x / rows / params.heads_k;
    const int row = packed / params.group_size, head = head_k * params.group_size + packed % params.group_size;
    wait_for_kernel_ahead();
    Body(params, blockIdx.x).run(batch, row, head, parts);
}

template <class Row, class T>
int launch_combine(const DecodeParams& params, cudaStream_t stream) {
    const int64_t blocks = int64_t{params.batch} * params.heads_q * params.seqlen_q;
    return launch_behind(combine_kernel<Row, T>, blocks, CombineSplits<T, Row::config.head_dim>::kThreads, 0, stream,
                         params.overlap, params);
}

}  // namespace libflash::cuda::sm80
