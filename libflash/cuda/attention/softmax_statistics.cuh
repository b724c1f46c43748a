// The first step of backward: writes delta = dout . out - dlse and the LSE of each query row to the workspace, and sets the dQ
// accumulator to zero. Also the gradient of the sink, which needs only these statistics.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/query_units.cuh"
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

// kHeadDim: the most channels. kParts: thread blocks that share a unit of kUnitRows rows.
template <class T, int kHeadDim, int kParts = 1>
struct SoftmaxStatisticsUnit {
    static constexpr int kThreads = 256, kLanes = softmax_statistics_lanes(kHeadDim, sizeof(T)), kValues = 16 / sizeof(T);
    static constexpr int kLoads = (kHeadDim + kLanes * kValues - 1) / (kLanes * kValues);  // of a lane, 16 bytes of a row each
    static constexpr int kPartRows = kUnitRows / kParts, kRowsAtOnce = kThreads / kLanes, kRounds = kPartRows / kRowsAtOnce;
    // Rows of a thread whose loads are in flight together.
    static constexpr int kTogether = kHeadDim > 256 ? 1 : (8 / kLoads < kRounds ? 8 / kLoads : kRounds);
    static constexpr int kSteps = kRounds / kTogether;
    static_assert(kRounds % kTogether == 0, "the last rows of a unit");

    const BackwardParams& params;
    TileCoordinates work;
    SequenceRows rows;

    template <class Element>
    __device__ __forceinline__ Element* row_start(const RowsParams& tensor, int row) const {
        return static_cast<Element*>(tensor.data) + work.batch * tensor.batch + work.head * tensor.head +
               (rows.start + row) * tensor.row;
    }

    // This lane's channels of dout and out, for every kRowsAtOnce-th row from a first row on; zeros where a row or channel is
    // missing.
    struct Vectors {
        uint4 dout[kTogether][kLoads], out[kTogether][kLoads];
    };
    __device__ __forceinline__ void load(Vectors& vectors, int first_row, int lane) const {
#pragma unroll
        for (int a = 0; a < kTogether; ++a) {
            const int row = first_row + a * kRowsAtOnce;
            const T *dout = row_start<const T>(params.dout, row), *out = row_start<const T>(params.out, row);
#pragma unroll
            for (int n = 0; n < kLoads; ++n) {
                const int c = (n * kLanes + lane) * kValues;
                const bool exists = row < rows.length && c < params.head_dim_v;
                vectors.dout[a][n] = exists ? *reinterpret_cast<const uint4*>(dout + c) : make_uint4(0, 0, 0, 0);
                vectors.out[a][n] = exists ? *reinterpret_cast<const uint4*>(out + c) : make_uint4(0, 0, 0, 0);
            }
        }
    }
    __device__ static __forceinline__ void multiply(const Vectors& vectors, float (&dots)[kTogether]) {
#pragma unroll
        for (int a = 0; a < kTogether; ++a)
#pragma unroll
            for (int n = 0; n < kLoads; ++n) {
                const T *x = reinterpret_cast<const T*>(&vectors.dout[a][n]), *y = reinterpret_cast<const T*>(&vectors.out[a][n]);
#pragma unroll
                for (int e = 0; e < kValues; ++e) dots[a] = fmaf(to_float(x[e]), to_float(y[e]), dots[a]);
            }
    }
    __device__ __forceinline__ void add_in_elements(int first_row, int lane, float (&dots)[kTogether]) const {
#pragma unroll 1
        for (int a = 0; a < kTogether; ++a) {
            const int row = first_row + a * kRowsAtOnce;
            if (row >= rows.length) return;
            const T *dout = row_start<const T>(params.dout, row), *out = row_start<const T>(params.out, row);
            float sum = 0.0f;
            for (int c = lane; c < params.head_dim_v; c += kLanes) sum = fmaf(to_float(dout[c]), to_float(out[c]), sum);
#pragma unroll
            for (int b = 0; b < kTogether; ++b)
                if (b == a) dots[b] = sum;
        }
    }

    __device__ __forceinline__ float number(const RowStatisticsParams& numbers, int row) const {
        return numbers.data[work.batch * numbers.batch + work.head * numbers.head + (rows.start + row) * numbers.row];
    }

    // LSE and dlse of a row.
    struct Numbers {
        float lse, dlse;
    };
    __device__ __forceinline__ Numbers numbers_of(int row) const {
        if (row >= rows.length) return {-INFINITY, 0.0f};
        return {number(params.lse, row), params.dlse.data ? number(params.dlse, row) : 0.0f};
    }
    __device__ static __forceinline__ SoftmaxStatistics statistics_of(const Numbers& of_row, float dot) {
        if (of_row.lse == -INFINITY) return {INFINITY, 0.0f};
        return {lse_with_margin(of_row.lse * kLog2e) - exponent_shift<T>(), dot - of_row.dlse};
    }

    __device__ __forceinline__ void run(int sums_per_unit) {
        const int part = static_cast<int>(blockIdx.x) % kParts, index = static_cast<int>(blockIdx.x) / kParts;
        work = tile_coordinates<kUnitRows>(params.query_schedule, params.q_lengths, params.batch, index);
        if (work.batch < 0) return;
        rows = SequenceRows::of(params.q_lengths, work.batch);
        if (work.tile * kUnitRows >= rows.owned) return;
        const int64_t unit = QueryUnits::in_first_kernel(params, params.query_schedule, index, work);
        const int lane = threadIdx.x % kLanes;
        SoftmaxStatistics* const statistics = params.softmax_statistics + unit * kUnitRows;
        const int sums = sums_per_unit / kParts / kSteps;  // cleared in a step
#pragma unroll 1
        for (int step = 0; step < kSteps; ++step) {
            const int i = part * kPartRows + step * kTogether * kRowsAtOnce + threadIdx.x / kLanes;
            const int first_row = work.tile * kUnitRows + i;
            float dots[kTogether] = {};
            Numbers numbers[kTogether];
            // All loads come first: the compiler moves no load before a store, and with few thread blocks only the stores of
            // zeros can hide the time of a load.
#pragma unroll
            for (int a = 0; a < kTogether; ++a) numbers[a] = numbers_of(first_row + a * kRowsAtOnce);
            if (params.vector_loads) {
                Vectors vectors;
                load(vectors, first_row, lane);
                clear(unit * sums_per_unit + (part * kSteps + step) * sums, sums);
                multiply(vectors, dots);
            } else {
                clear(unit * sums_per_unit + (part * kSteps + step) * sums, sums);
                add_in_elements(first_row, lane, dots);
            }
#pragma unroll
            for (int a = 0; a < kTogether; ++a) {
#pragma unroll
                for (int distance = kLanes / 2; distance > 0; distance /= 2)
                    dots[a] += __shfl_xor_sync(0xffffffffu, dots[a], distance);
            }
#pragma unroll
            for (int a = 0; a < kTogether; ++a)
                if (lane == 0) statistics[i + a * kRowsAtOnce] = statistics_of(numbers[a], dots[a]);
        }
    }

    // Sets `count` floats of the dQ accumulator to zero.
    __device__ __forceinline__ void clear(int64_t first, int count) const {
        if (!params.dq_accumulator) return;
        float4* const sums = reinterpret_cast<float4*>(params.dq_accumulator + first);
        for (int i = threadIdx.x; i < count / 4; i += kThreads) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
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
                params.softmax_statistics + QueryUnits::first(params, batch, head, rows) * kUnitRows;
            if (sink == -INFINITY) continue;
            for (int row = threadIdx.x; row < rows.length; row += kThreads) {
                const SoftmaxStatistics f = statistics[row];
                // The probability of the sink is the square of `root`. It may underflow where its product with delta does not.
                const float root = exp2_approx(0.5f * min_or_nan(sink - f.lse_log2 - exponent_shift<T>(), 0.0f));
                sum -= root * (root * f.delta);
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
