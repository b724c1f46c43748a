// The scores of the float64 kernels, one element at a time: a thread block keeps the dot products of a tile in shared memory, and
// each thread processes elements of one query row. All options are checked at run time, so one instance supports all of them.
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/shard.cuh"
#include "cuda/tile/exp_f64.cuh"

namespace libflash::cuda::sm80 {

constexpr int kDoubleWarps = 4, kDoubleThreads = kDoubleWarps * 32;

// Blocks of 8 channels that a warp computes of an output with head_dim channels.
constexpr int double_channel_blocks(int head_dim) { return head_dim / 8 / kDoubleWarps; }

__device__ __forceinline__ double number_at(const void* data, int64_t index, bool is_float) {
    return is_float ? static_cast<const float*>(data)[index] : static_cast<const double*>(data)[index];
}
__device__ __forceinline__ void store_number_at(void* data, int64_t index, bool is_float, double x) {
    if (is_float) {
        static_cast<float*>(data)[index] = static_cast<float>(x);
    } else {
        static_cast<double*>(data)[index] = x;
    }
}
__device__ __forceinline__ double head_number_at(const HeadParams& numbers, int batch, int head) {
    return number_at(numbers.data, batch * numbers.batch_stride + head * numbers.head_stride, numbers.is_float);
}

// The address of the number of row `first_row` of a head.
__device__ __forceinline__ double* row_numbers(const RowStatisticsParams& numbers, int batch, int head, int first_row) {
    return reinterpret_cast<double*>(numbers.data) + batch * numbers.batch + head * numbers.head + first_row * numbers.row;
}

// The address of row `first_row` of a head.
__device__ __forceinline__ double* rows_of(const RowsParams& rows, int batch, int head, int first_row) {
    return static_cast<double*>(rows.data) + batch * rows.batch + first_row * rows.row + head * rows.head;
}

// The sum and the maximum over kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ double sum_of_lanes(double x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
template <int kLanes>
__device__ __forceinline__ double largest_of_lanes(double x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) x = fmax(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// exp(score - lse), at most 1, so that the rounding error of a large LSE cannot make it overflow. NaN propagates.
__device__ __forceinline__ double probability(double score, double lse) {
    const double exponent = score - lse;
    return exp_of_score(exponent > 0.0 ? 0.0 : exponent);
}

// The score options of one head of one sequence. Params: the parameters of forward, backward or a tangent operation.
template <class Params>
struct DoubleScore {
    const Params& params;
    TileCoordinates work;
    double slope;     // of ALiBi
    int alibi_shift;  // the key at ALiBi distance 0 of row 0

    __device__ __forceinline__ DoubleScore(const Params& p, const TileCoordinates& tile, int shift)
        : params(p), work(tile), alibi_shift(shift) {
        slope = p.rare.alibi_slopes.data ? head_number_at(p.rare.alibi_slopes, tile.batch, tile.head) : 0.0;
    }

    __device__ __forceinline__ int64_t offset_of(const ScoreParams& tensor, int row, int key) const {
        return work.batch * tensor.stride[0] + work.head * tensor.stride[1] + row * tensor.stride[2] + key * tensor.stride[3];
    }

    // Whether the boolean mask keeps an element.
    __device__ __forceinline__ bool keeps(int row, int key) const {
        const ScoreParams& mask = params.rare.mask;
        return !mask.data || static_cast<const uint8_t*>(mask.data)[offset_of(mask, row, key)];
    }

    // The score of a dot product. tanh_z: tanh(z / softcap) of the scaled dot product z, 0 without softcap; the derivative of the
    // score with respect to z is 1 - tanh_z^2. The row and the key exist.
    __device__ __forceinline__ double score(double dot, int row, int key, double* tanh_z) const {
        const RareParams& rare = params.rare;
        double x = dot * params.in_double.softmax_scale;
        *tanh_z = 0.0;
        if (params.in_double.softcap > 0.0) {
            *tanh_z = tanh(x / params.in_double.softcap);
            x = params.in_double.softcap * *tanh_z;
        }
        if (rare.alibi_slopes.data) x -= slope * fabs(static_cast<double>(row + alibi_shift - key));
        if (rare.bias.data) x += number_at(rare.bias.data, offset_of(rare.bias, row, key), rare.bias.is_float);
        return x;
    }
};

// Whether dropout keeps a probability. `head`: from dropout_head().
__device__ __forceinline__ bool dropout_keeps(const DropoutParams& dropout, uint32_t head, int row, int key) {
    if (!dropout.active) return true;
    return is_kept(dropout, head, row, key);
}

}  // namespace libflash::cuda::sm80
