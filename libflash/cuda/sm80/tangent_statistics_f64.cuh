// The statistics of the query rows for backward_tangent in float64, and the tangent of the gradient of the sink.
#pragma once

#include "cuda/attention/query_units.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/tangent_params.h"
#include "cuda/sm80/score_f64.cuh"
#include "cuda/sm80/statistics_f64.cuh"

namespace libflash::cuda::sm80 {

// Computes the statistics of a unit (kUnitRows query rows of a head), one row per warp at a time.
struct DoubleTangentStatisticsUnit {
    static constexpr int kThreads = 256;

    const BackwardTangentParams& params;
    TileCoordinates work;
    SequenceRows rows;

    __device__ __forceinline__ double number(const RowStatisticsParams& numbers, int row) const {
        return numbers.data ? row_numbers(numbers, work.batch, work.head, rows.start)[row * numbers.row] : 0.0;
    }
    // The dot product of two rows, by a whole warp; 0 if a tensor is absent.
    __device__ __forceinline__ double dot(const RowsParams& a, const RowsParams& b, int row) const {
        if (!a.data || !b.data) return 0.0;
        const double* x = rows_of(a, work.batch, work.head, rows.start + row);
        const double* y = rows_of(b, work.batch, work.head, rows.start + row);
        double sum = 0.0;
#pragma unroll 1
        for (int c = threadIdx.x % 32; c < params.head_dim_v; c += 32) sum = fma(x[c], y[c], sum);
        return sum_of_lanes<32>(sum);
    }
    // {+infinity, 0, 0, 0} for a row that does not exist or sees no key.
    __device__ __forceinline__ DoubleTangentStatistics of(int row) const {
        const double lse = row < rows.length ? number(params.lse, row) : -INFINITY;
        if (lse == -INFINITY) return {INFINITY, 0.0, 0.0, 0.0};
        double delta = number(params.delta, row), tdelta = number(params.tdelta, row);
        if (!params.delta.data) delta = dot(params.dout, params.out, row) - number(params.dlse, row);
        if (!params.tdelta.data)
            tdelta = dot(params.tdout, params.out, row) + dot(params.dout, params.tout, row) - number(params.tdlse, row);
        return {lse, delta, number(params.tlse, row), tdelta};
    }

    __device__ __forceinline__ void run() {
        const int index = static_cast<int>(blockIdx.x);
        work = tile_coordinates<kUnitRows>(params.unit_schedule, params.q_lengths, params.batch, index);
        if (work.batch < 0) return;
        rows = SequenceRows::of(params.q_lengths, work.batch);
        if (work.tile * kUnitRows >= rows.owned) return;
        const int64_t unit = QueryUnits::in_first_kernel(params, params.unit_schedule, index, work);
        DoubleTangentStatistics* const to = reinterpret_cast<DoubleTangentStatistics*>(params.statistics) + unit * kUnitRows;
#pragma unroll 1
        for (int i = threadIdx.x / 32; i < kUnitRows; i += kThreads / 32) {
            const DoubleTangentStatistics made = of(work.tile * kUnitRows + i);
            if (threadIdx.x % 32 == 0) to[i] = made;
        }
    }
};

// tdsink = -sum over rows of exp(sink - lse) ((tsink - mu) delta + tdelta). One thread block sums all sequences of a head, in a
// fixed order.
struct DoubleTangentDsink {
    static constexpr int kThreads = 256;

    __device__ static __forceinline__ double partial(const BackwardTangentParams& params, int head) {
        double sum = 0.0;
        for (int batch = 0; batch < params.batch; ++batch) {
            const double sink = head_number_at(params.sink, batch, head);
            if (sink == -INFINITY) continue;
            const double tsink = params.tsink.data ? head_number_at(params.tsink, batch, head) : 0.0;
            const SequenceRows rows = SequenceRows::of(params.q_lengths, batch);
            const DoubleTangentStatistics* statistics = reinterpret_cast<const DoubleTangentStatistics*>(params.statistics) +
                                                        QueryUnits::first(params, batch, head, rows) * kUnitRows;
#pragma unroll 1
            for (int row = threadIdx.x; row < rows.length; row += kThreads) {
                const DoubleTangentStatistics of = statistics[row];
                if (of.lse != INFINITY) sum -= probability(sink, of.lse) * fma(tsink - of.mu, of.delta, of.tdelta);
            }
        }
        return sum;
    }

    __device__ static __forceinline__ void run(const BackwardTangentParams& params) {
        const double total = sum_of_block<kThreads>(partial(params, blockIdx.x));
        if (threadIdx.x == 0)
            store_number_at(params.tdsink.data, blockIdx.x * params.tdsink.stride, params.tdsink.is_float, total);
    }
};

}  // namespace libflash::cuda::sm80
