// The first step of backward_tangent: the statistics of each query row that the other kernels need.
#pragma once

#include "cuda/attention/query_units.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/softmax_statistics.cuh"
#include "cuda/attention/tangent_params.h"

namespace libflash::cuda {

template <class T>
struct TangentStatisticsUnit {
    static constexpr int kThreads = 256;
    static constexpr int kVector = 16 / static_cast<int>(sizeof(T));  // elements that a lane reads at once
    static constexpr int kLanes = 8;                                  // per row, if rows are read in vectors; else a warp

    struct alignas(16) Vector {
        T x[kVector];
    };

    const BackwardTangentParams& params;
    TileCoordinates work;
    SequenceRows rows;

    // nullptr: zeros.
    __device__ __forceinline__ const T* row_of(const RowsParams& tensor, int row) const {
        if (!tensor.data) return nullptr;
        return static_cast<const T*>(tensor.data) + work.batch * tensor.batch + work.head * tensor.head +
               (rows.start + row) * tensor.row;
    }
    __device__ __forceinline__ float number(const RowStatisticsParams& numbers, int row) const {
        if (!numbers.data) return 0.0f;
        return numbers.data[work.batch * numbers.batch + work.head * numbers.head + (rows.start + row) * numbers.row];
    }

    // This lane's part of the product of two rows.
    template <int kLanesOfRow>
    __device__ __forceinline__ float partial_dot(const T* x, const T* y) const {
        const int lane = threadIdx.x % kLanesOfRow;
        float sum = 0.0f;
        // Memory limits the speed, and enough warps are in flight: further unrolling would only double the code.
        if constexpr (kLanesOfRow == 32) {
#pragma unroll 2
            for (int c = lane; c < params.head_dim_v; c += 32) sum = fmaf(to_float(x[c]), to_float(y[c]), sum);
        } else {
#pragma unroll 1
            for (int c = lane * kVector; c < params.head_dim_v; c += kLanesOfRow * kVector) {
                const Vector a = *reinterpret_cast<const Vector*>(x + c), b = *reinterpret_cast<const Vector*>(y + c);
#pragma unroll
                for (int i = 0; i < kVector; ++i) sum = fmaf(to_float(a.x[i]), to_float(b.x[i]), sum);
            }
        }
        return sum;
    }
    // The product of two rows, by kLanesOfRow lanes; 0 if either is absent or the row is not in use. The lanes of other rows of
    // the warp call it, too.
    template <int kLanesOfRow>
    __device__ __forceinline__ float dot(const T* x, const T* y, bool sees_keys) const {
        if (!x || !y) return 0.0f;
        float sum = sees_keys ? partial_dot<kLanesOfRow>(x, y) : 0.0f;
#pragma unroll
        for (int step = kLanesOfRow / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        return sum;
    }

    template <int kLanesOfRow>
    __device__ __forceinline__ TangentStatistics of(int row) const {
        const float lse = row < rows.length ? number(params.lse, row) : -INFINITY;
        const bool sees_keys = lse != -INFINITY;
        const T *out = row_of(params.out, row), *dout = row_of(params.dout, row);
        float dotted = 0.0f, moved = 0.0f;
        if (!params.delta.data) dotted = dot<kLanesOfRow>(dout, out, sees_keys);
        if (!params.tdelta.data)
            moved = dot<kLanesOfRow>(row_of(params.tdout, row), out, sees_keys) +
                    dot<kLanesOfRow>(dout, row_of(params.tout, row), sees_keys);
        if (!sees_keys) return {INFINITY, 0.0f, 0.0f, 0.0f};
        return {lse_with_margin(lse * kLog2e) - exponent_shift<T>(),
                params.delta.data ? number(params.delta, row) : dotted - number(params.dlse, row), number(params.tlse, row),
                params.tdelta.data ? number(params.tdelta, row) : moved - number(params.tdlse, row)};
    }

    __device__ __forceinline__ void run() {
        if (params.next_tiles && blockIdx.x == 0 && threadIdx.x < 2) params.next_tiles[threadIdx.x] = 0;
        const int index = static_cast<int>(blockIdx.x);
        work = tile_coordinates<kUnitRows>(params.unit_schedule, params.q_lengths, params.batch, index);
        if (work.batch < 0) return;
        rows = SequenceRows::of(params.q_lengths, work.batch);
        if (work.tile * kUnitRows >= rows.owned) return;
        const int64_t unit = QueryUnits::in_first_kernel(params, params.unit_schedule, index, work);
        TangentStatistics* const statistics = params.statistics + unit * kUnitRows;
        if (params.vector_rows)
            write<kLanes>(statistics);
        else
            write<32>(statistics);
    }

    template <int kLanesOfRow>
    __device__ __forceinline__ void write(TangentStatistics* statistics) const {
#pragma unroll 1
        for (int i = threadIdx.x / kLanesOfRow; i < kUnitRows; i += kThreads / kLanesOfRow) {
            const TangentStatistics made = of<kLanesOfRow>(work.tile * kUnitRows + i);
            if (threadIdx.x % kLanesOfRow == 0) statistics[i] = made;
        }
    }
};

// tdsink = -sum over rows of exp(sink - lse) ((tsink - mu) delta + tdelta). One thread block sums all sequences of a head, so the
// order of the sum is fixed.
template <class T>
struct TangentDsink {
    static constexpr int kThreads = 512;

    __device__ static __forceinline__ float partial(const BackwardTangentParams& params, int head) {
        float sum = 0.0f;
        for (int batch = 0; batch < params.batch; ++batch) {
            const float sink = head_number<T>(params.sink, batch, head) * kLog2e;
            if (sink == -INFINITY) continue;
            const float tsink = params.tsink.data ? head_number<T>(params.tsink, batch, head) : 0.0f;
            const SequenceRows rows = SequenceRows::of(params.q_lengths, batch);
            const TangentStatistics* statistics = params.statistics + QueryUnits::first(params, batch, head, rows) * kUnitRows;
            for (int row = threadIdx.x; row < rows.length; row += kThreads) {
                const TangentStatistics of = statistics[row];
                const float sum_of_row = fmaf(tsink - of.mu, of.delta, of.tdelta);
                const float root = exp2_approx(0.5f * min_or_nan(sink - of.lse_log2 - exponent_shift<T>(), 0.0f));
                if (of.lse_log2 != INFINITY) sum -= root * (root * sum_of_row);  // as in Dsink
            }
        }
        return sum;
    }

    __device__ static __forceinline__ void run(const BackwardTangentParams& params) {
        __shared__ float of_warp[kThreads / 32];
        float sum = partial(params, blockIdx.x);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
        __syncthreads();
        if (threadIdx.x != 0) return;
        float total = 0.0f;
        for (const float part : of_warp) total += part;
        store_number<T>(params.tdsink.data, blockIdx.x * params.tdsink.stride, params.tdsink.is_float, total);
    }
};

}  // namespace libflash::cuda
