// The first step of backward: writes delta = dout . out - dlse and the LSE of each query row to the workspace, and sets the dQ
// accumulator to zero. Also the gradient of the sink, which needs only these statistics.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/math.cuh"

namespace libflash::cuda {

// Lanes that share a row of up to head_dim channels: each reads 16 bytes at a time.
constexpr int softmax_statistics_lanes(int head_dim, int element) {
    const int loads = head_dim * element / 16;
    return loads >= 16 ? 16 : (loads >= 8 ? 8 : 4);
}

// The rounding error of a large LSE could make exp2(score - lse) overflow. Such an LSE is raised by more than that error; its
// probabilities have no correct digit in any case.
__device__ __forceinline__ float lse_with_margin(float lse_log2) {
    return fabsf(lse_log2) > 1048576.0f ? fmaf(fabsf(lse_log2), 4.7683716e-07f, lse_log2) : lse_log2;
}

// kTogether: rows whose loads are in flight together.
template <class T, int kLanes, int kTogether = sizeof(T) == 4 ? 2 : 4>
struct SoftmaxStatisticsUnit {
    static constexpr int kThreads = 256;

    const BackwardParams& params;
    TileCoordinates work;
    SequenceRows rows;

    template <class Element>
    __device__ __forceinline__ Element* row_start(const RowsParams& tensor, int row) const {
        return static_cast<Element*>(tensor.data) + work.batch * tensor.batch + work.head * tensor.head +
               (rows.start + row) * tensor.row;
    }

    // This lane's part of dout . out.
    __device__ __forceinline__ float partial_dot(int row, int lane) const {
        const T* dout = row_start<const T>(params.dout, row);
        const T* out = row_start<const T>(params.out, row);
        float sum = 0.0f;
        if (params.vector_loads) {
            constexpr int kValues = 16 / sizeof(T);
            for (int c = lane * kValues; c < params.head_dim_v; c += kLanes * kValues) {
                const uint4 x = *reinterpret_cast<const uint4*>(dout + c), y = *reinterpret_cast<const uint4*>(out + c);
                const T *xs = reinterpret_cast<const T*>(&x), *ys = reinterpret_cast<const T*>(&y);
#pragma unroll
                for (int e = 0; e < kValues; ++e) sum = fmaf(to_float(xs[e]), to_float(ys[e]), sum);
            }
        } else {
            for (int c = lane; c < params.head_dim_v; c += kLanes) sum = fmaf(to_float(dout[c]), to_float(out[c]), sum);
        }
        return sum;
    }

    __device__ __forceinline__ float number(const RowStatisticsParams& numbers, int row) const {
        return numbers.data[work.batch * numbers.batch + work.head * numbers.head + (rows.start + row) * numbers.row];
    }

    __device__ __forceinline__ SoftmaxStatistics statistics_of(int row, float dot) const {
        if (row >= rows.length) return {INFINITY, 0.0f};
        const float lse = number(params.lse, row);
        if (lse == -INFINITY) return {INFINITY, 0.0f};
        return {lse_with_margin(lse * kLog2e) - exponent_shift<T>(), params.dlse.data ? dot - number(params.dlse, row) : dot};
    }

    __device__ __forceinline__ void run(int sums_per_unit) {
        work = tile_coordinates<kUnitRows>(params.query_schedule, params.q_lengths, params.batch);
        if (work.batch < 0) return;
        rows = SequenceRows::of(params.q_lengths, work.batch);
        if (work.tile * kUnitRows >= rows.owned) return;
        const int64_t unit = QueryUnits::first(params, work.batch, work.head, rows.start) + work.tile;
        if (params.dq_accumulator)
            clear(reinterpret_cast<float4*>(params.dq_accumulator + unit * sums_per_unit), sums_per_unit / 4);
        const int lane = threadIdx.x % kLanes;
#pragma unroll kTogether
        for (int i = threadIdx.x / kLanes; i < kUnitRows; i += kThreads / kLanes) {
            const int row = work.tile * kUnitRows + i;
            float dot = row < rows.length ? partial_dot(row, lane) : 0.0f;
#pragma unroll
            for (int step = kLanes / 2; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
            if (lane == 0) params.softmax_statistics[unit * kUnitRows + i] = statistics_of(row, dot);
        }
    }

    __device__ static __forceinline__ void clear(float4* sums, int count) {
        for (int i = threadIdx.x; i < count; i += kThreads) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
};

// dsink = -sum over rows of exp(sink - lse) delta. One thread block sums all sequences of a head, so the order of the sum is
// fixed.
template <class T>
struct Dsink {
    static constexpr int kThreads = 512;

    __device__ static __forceinline__ float partial(const BackwardParams& params, int head) {
        float sum = 0.0f;
        for (int batch = 0; batch < params.batch; ++batch) {
            const SequenceRows rows = SequenceRows::of(params.q_lengths, batch);
            const float sink = head_number<T>(params.sink, batch, head) * kLog2e;
            const SoftmaxStatistics* statistics =
                params.softmax_statistics + QueryUnits::first(params, batch, head, rows.start) * kUnitRows;
            if (sink == -INFINITY) continue;
            for (int row = threadIdx.x; row < rows.length; row += kThreads) {
                const SoftmaxStatistics f = statistics[row];
                sum -= exp2_approx(min_or_nan(sink - f.lse_log2 - exponent_shift<T>(), 0.0f)) * f.delta;
            }
        }
        return sum;
    }

    __device__ static __forceinline__ void run(const BackwardParams& params) {
        __shared__ float of_warp[kThreads / 32];
        const int head = blockIdx.x;
        float sum = partial(params, head);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
        __syncthreads();
        if (threadIdx.x != 0) return;
        float total = 0.0f;
        for (const float part : of_warp) total += part;
        store_number<T>(params.dsink.data, head * params.dsink.stride, params.dsink.is_float, total);
    }
};

}  // namespace libflash::cuda
