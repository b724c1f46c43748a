// The bias of the scores of a lane, in the layout of tile/accumulator.cuh: columns are keys.
#pragma once

#include "cuda/attention/bias_pairs.cuh"
#include "cuda/attention/score_rows.cuh"

namespace libflash::cuda {

// Of kKeys keys, two at a time.
template <int kKeys, class Number>
struct RowBiasPairs {
    using Pair = BiasPair<Number>;
    Pair pairs[2][kKeys / 8];

    // Whether `count` keys of each row can be loaded in pairs.
    __device__ __forceinline__ static bool loads(const ScoreRows<Number>& bias, int count) {
        return bias.loads(count, sizeof(Pair));
    }
    // From key `first` on. `row`: the lane's first row. Rows that do not exist get zeros.
    __device__ __forceinline__ void load(const ScoreRows<Number>& bias, int first, int row, int lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Number* const of_row = bias.first + (row + 8 * r) * bias.row_stride + first + (lane & 3) * 2;
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
                pairs[r][n] = row + 8 * r < bias.rows ? *reinterpret_cast<const Pair*>(of_row + 8 * n) : Pair{};
        }
    }
    // scores = factor * scores + bias.
    template <int kScores>
    __device__ __forceinline__ void add_to(float (&scores)[kScores], float factor, int first) const {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
                float* const two = scores + first / 2 + 4 * n + 2 * r;
                two[0] = fmaf(two[0], factor, pairs[r][n].low());
                two[1] = fmaf(two[1], factor, pairs[r][n].high());
            }
    }
};

// scores = factor * scores + bias, for kKeys keys. Of rows and keys that do not exist the results mean nothing.
template <int kKeys, class Number>
__device__ __forceinline__ void add_row_bias(float (&scores)[kKeys / 2], float factor, const ScoreRows<Number>& bias, int row,
                                             int lane) {
    constexpr int kPart = sizeof(Number) == 2 ? kKeys : 32;  // keys whose bias is in registers at the same time
    using Pairs = RowBiasPairs<kPart, Number>;
    if (!Pairs::loads(bias, kKeys))
        return bias.template for_elements<kKeys>(row, lane,
                                                 [&](int i, Number x) { scores[i] = fmaf(scores[i], factor, to_float(x)); });
#pragma unroll
    for (int first = 0; first < kKeys; first += kPart) {
        Pairs pairs;
        pairs.load(bias, first, row, lane);
        pairs.add_to(scores, factor, first);
    }
}

}  // namespace libflash::cuda
