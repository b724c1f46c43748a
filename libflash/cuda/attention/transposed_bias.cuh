// The bias of transposed scores (tile/accumulator.cuh). Two neighbouring elements of a lane belong to two queries and one key,
// which are in two rows of the bias. Here each lane loads two neighbouring keys of one row, and the lanes exchange them.
#pragma once

#include "cuda/attention/bias_pairs.cuh"
#include "cuda/attention/score_rows.cuh"

namespace libflash::cuda {

// The bias of kQueries query rows from a row on and of the warp's 16 keys, in pairs. When the lanes have exchanged them,
// pairs[n][k] belongs to elements 4 n + 2 k and 4 n + 2 k + 1 of the lane's scores. Rows that do not exist have 0. load() may
// be called only if loads() is true.
template <int kQueries, class Number>
struct TransposedBias {
    using Pair = BiasPair<Number>;
    Pair pairs[kQueries / 8][2];

    // Whether the pairs can be loaded.
    __device__ __forceinline__ static bool loads(const ScoreRows<Number>& bias) { return bias.loads(16, sizeof(Pair)); }
    __device__ __forceinline__ void load(const ScoreRows<Number>& bias, int row, int lane) {
        const int first_row = row + (lane >> 2);
        const Number* const of_lane = bias.first + first_row * bias.row_stride + (lane & 3) * 2;
#pragma unroll
        for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                pairs[n][k] = first_row + 8 * n < bias.rows
                                  ? *reinterpret_cast<const Pair*>(of_lane + 8 * n * bias.row_stride + 8 * k)
                                  : Pair{};
    }
    // scores = factor * scores + bias. The whole warp calls it.
    __device__ __forceinline__ void add(float (&scores)[kQueries / 2], float factor) {
#pragma unroll
        for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                pairs[n][k].transpose();
                float* const two = scores + 4 * n + 2 * k;
                two[0] = fmaf(two[0], factor, pairs[n][k].low());
                two[1] = fmaf(two[1], factor, pairs[n][k].high());
            }
    }
};

// scores = factor * scores + bias, for a bias whatever its strides.
template <int kQueries, class Number>
__device__ __forceinline__ void add_single_numbers(float (&scores)[kQueries / 2], float factor, const ScoreRows<Number>& bias,
                                                   int row, int lane) {
    bias.template for_transposed_elements<kQueries>(row, lane,
                                                    [&](int i, Number x) { scores[i] = fmaf(scores[i], factor, to_float(x)); });
}

// The same, in pairs if possible. The whole warp calls it.
template <int kQueries, class Number>
__device__ __forceinline__ void add_transposed_bias(float (&scores)[kQueries / 2], float factor, const ScoreRows<Number>& bias,
                                                    int row, int lane) {
    using Pairs = TransposedBias<kQueries, Number>;
    if (!Pairs::loads(bias)) return add_single_numbers<kQueries>(scores, factor, bias, row, lane);
    Pairs pairs;
    pairs.load(bias, row, lane);
    pairs.add(scores, factor);
}

}  // namespace libflash::cuda
