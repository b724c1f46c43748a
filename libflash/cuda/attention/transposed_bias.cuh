// The bias of transposed scores. In the layout of wgmma a lane has scores of two neighbouring queries and of one key, which are
// in two rows of the bias. Here each lane loads two neighbouring keys of one row, and the lanes exchange them.
#pragma once

#include "cuda/attention/bias_pairs.cuh"
#include "cuda/attention/score_rows.cuh"

namespace libflash::cuda {

// scores = factor * scores + bias, for kQueries query rows from `row` on: element 4 n + 2 k + e of a lane belongs to query
// row + 8 n + 2 (lane % 4) + e and to key 8 k + lane / 4 of the warp's. Of rows and keys that do not exist the results mean
// nothing. The whole warp calls it.
template <int kQueries, class Number>
__device__ __forceinline__ void add_transposed_bias(float (&scores)[kQueries / 2], float factor, const ScoreRows<Number>& bias,
                                                    int row, int lane) {
    using Pair = BiasPair<Number>;
    if (!bias.loads(16, sizeof(Pair)))
        return bias.template for_transposed_elements<kQueries>(
            row, lane, [&](int i, Number x) { scores[i] = fmaf(scores[i], factor, to_float(x)); });
    const int first_row = row + (lane >> 2);
    const Number* const of_lane = bias.first + first_row * bias.row_stride + (lane & 3) * 2;
    Pair pairs[kQueries / 8][2];
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
        for (int k = 0; k < 2; ++k)
            pairs[n][k] = first_row + 8 * n < bias.rows
                              ? *reinterpret_cast<const Pair*>(of_lane + 8 * n * bias.row_stride + 8 * k)
                              : Pair{};
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

}  // namespace libflash::cuda
