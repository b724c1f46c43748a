// The softmax statistics of the query rows for backward in float64, and the gradient of the sink, which needs nothing else.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/query_units.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/params.h"
#include "cuda/sm80/score_f64.cuh"

namespace libflash::cuda::sm80 {

// Computes the statistics of a unit (kUnitRows query rows of a head), one row per warp at a time: the LSE, and
// delta = dout . out - dlse or the delta of the caller.
struct DoubleStatisticsUnit {
    static constexpr int kThreads = 256;

    const BackwardParams& params;
    TileCoordinates work;
    SequenceRows rows;

    __device__ __forceinline__ double number(const RowStatisticsParams& numbers, int row) const {
        return row_numbers(numbers, work.batch, work.head, rows.start)[row * numbers.row];
    }
    __device__ __forceinline__ double dot(int row, int lane) const {
        const double* dout = rows_of(params.dout, work.batch, work.head, rows.start + row);
        const double* out = rows_of(params.out, work.batch, work.head, rows.start + row);
        double sum = 0.0;
#pragma unroll 1
        for (int c = lane; c < params.head_dim_v; c += 32) sum = fma(dout[c], out[c], sum);
        return sum_of_lanes<32>(sum);
    }
    // {+infinity, 0} for a row that does not exist or sees no key.
    __device__ __forceinline__ DoubleStatistics of(int row, int lane) const {
        const double lse = row < rows.length ? number(params.lse, row) : -INFINITY;
        if (lse == -INFINITY) return {INFINITY, 0.0};
        if (params.delta.data && params.adds) return {lse, number(params.delta, row)};
        return {lse, dot(row, lane) - (params.dlse.data ? number(params.dlse, row) : 0.0)};
    }

    __device__ __forceinline__ void run() {
        const int index = static_cast<int>(blockIdx.x);
        work = tile_coordinates<kUnitRows>(params.query_schedule, params.q_lengths, params.batch, index);
        if (work.batch < 0) return;
        rows = SequenceRows::of(params.q_lengths, work.batch);
        const int first = work.tile * kUnitRows, lane = threadIdx.x % 32;
        if (first >= rows.owned) return;
        const int64_t unit = QueryUnits::in_first_kernel(params, params.query_schedule, index, work);
        DoubleStatistics* const to = reinterpret_cast<DoubleStatistics*>(params.softmax_statistics) + unit * kUnitRows;
#pragma unroll 1
        for (int i = threadIdx.x / 32; i < kUnitRows; i += kThreads / 32) {
            const DoubleStatistics made = of(first + i, lane);
            if (lane != 0) continue;
            to[i] = made;
            if (params.delta.data && !params.adds && first + i < rows.owned)
                row_numbers(params.delta, work.batch, work.head, rows.start)[(first + i) * params.delta.row] = made.delta;
        }
    }
};

// The sum of x over all kThreads threads of the thread block. Only thread 0 gets the sum.
template <int kThreads>
__device__ __forceinline__ double sum_of_block(double x) {
    __shared__ double of_warp[kThreads / 32];
    x = sum_of_lanes<32>(x);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    double total = 0.0;
    if (threadIdx.x == 0)
#pragma unroll 1
        for (const double part : of_warp) total += part;
    return total;
}

// dsink = -sum over rows of exp(sink - lse) delta. One thread block sums all sequences of a head, in a fixed order.
struct DoubleDsink {
    static constexpr int kThreads = 256;

    __device__ static __forceinline__ double partial(const BackwardParams& params, int head) {
        double sum = 0.0;
        for (int batch = 0; batch < params.batch; ++batch) {
            const double sink = head_number_at(params.sink, batch, head);
            if (sink == -INFINITY) continue;
            const SequenceRows rows = SequenceRows::of(params.q_lengths, batch);
            const DoubleStatistics* statistics = reinterpret_cast<const DoubleStatistics*>(params.softmax_statistics) +
                                                 QueryUnits::first(params, batch, head, rows) * kUnitRows;
#pragma unroll 1
            for (int row = threadIdx.x; row < rows.length; row += kThreads)
                sum -= probability(sink, statistics[row].lse) * statistics[row].delta;
        }
        return sum;
    }

    __device__ static __forceinline__ void run(const BackwardParams& params) {
        const double total = sum_of_block<kThreads>(partial(params, blockIdx.x));
        if (threadIdx.x == 0) store_number_at(params.dsink.data, blockIdx.x * params.dsink.stride, params.dsink.is_float, total);
    }
};

}  // namespace libflash::cuda::sm80
