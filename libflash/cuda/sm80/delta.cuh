// delta = rowsum(dout * out) - dlse in a tensor of the caller. If several calls compute the gradients, each for a part of the
// keys, all of them need the same delta. The first call writes it: this kernel runs after the kernel of the softmax statistics.
// The other calls (params.adds) read it: this kernel runs in place of the kernel of the softmax statistics.
#pragma once

#include "cuda/attention/softmax_statistics.cuh"

namespace libflash::cuda::sm80 {

template <class Statistics>
struct Delta : Statistics {
    using Statistics::kThreads, Statistics::params, Statistics::rows, Statistics::work;

    __device__ __forceinline__ float* delta_of(int row) const {
        const RowStatisticsParams& delta = params.delta;
        return delta.data + work.batch * delta.batch + work.head * delta.head + (rows.start + row) * delta.row;
    }

    __device__ __forceinline__ void run(int sums_per_unit) {
        const int index = static_cast<int>(blockIdx.x);
        work = tile_coordinates<kUnitRows>(params.query_schedule, params.q_lengths, params.batch, index);
        if (work.batch < 0) return;
        rows = SequenceRows::of(params.q_lengths, work.batch);
        const int first = work.tile * kUnitRows;
        if (first >= rows.owned) return;
        const int64_t unit = QueryUnits::in_first_kernel(params, params.query_schedule, index, work);
        SoftmaxStatistics* const statistics = params.softmax_statistics + unit * kUnitRows;
        if (params.adds) this->clear(unit * sums_per_unit, sums_per_unit);
#pragma unroll 1
        for (int i = threadIdx.x; i < kUnitRows; i += kThreads) {
            if (!params.adds) {
                if (first + i < rows.owned) *delta_of(first + i) = statistics[i].delta;
                continue;
            }
            SoftmaxStatistics made = this->statistics_of(this->numbers_of(first + i), 0.0f);
            if (made.lse_log2 != INFINITY) made.delta = *delta_of(first + i);
            statistics[i] = made;
        }
    }
};

}  // namespace libflash::cuda::sm80
