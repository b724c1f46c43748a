// Statistics of the query rows of forward in float64 (attention/row_statistics.cuh defines them). Scores are in natural units,
// and the sums are relative to the row maximum, which is the largest score.
#pragma once

#include "cuda/attention/head_maxima.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/row_statistics.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/sm80/score_f64.cuh"

namespace libflash::cuda::sm80 {

// p * exponent, but 0 if p is 0, even if the exponent is infinite.
__device__ __forceinline__ double weighted_exponent(double p, double exponent) { return p == 0.0 ? 0.0 : p * exponent; }
__device__ __forceinline__ double weighted_share(double factor, double sum) { return factor == 0.0 ? 0.0 : factor * sum; }

struct DoubleRowStatistics {
    double weighted = 0.0;  // sum of p * log(p)

    // Adds new keys. `sum`: the row sum of the earlier keys. `change`: the old minus the new maximum. `factor`: exp(change).
    // `more`: the sum of p * log(p) of the new keys.
    __device__ __forceinline__ void add(double sum, double change, double factor, double more) {
        weighted = weighted_share(factor, weighted + weighted_exponent(sum, change)) + more;
    }
};

// Writes the statistics of a row. `row`: in the batch entry or the packed tensor.
__device__ __forceinline__ void store_statistics(const ForwardStatisticsParams& params, const TileCoordinates& work, int row,
                                                 double largest, double entropy) {
    const auto store = [&](const RowStatisticsParams& to, double x) {
        if (to.data) *row_numbers(to, work.batch, work.head, row) = x;
    };
    store(params.max_logit, largest + 0.0);  // never -0
    store(params.entropy, entropy);
    if (params.head_maxima)
        raise_to(reinterpret_cast<double*>(params.head_maxima) + work.head * params.head_maxima_stride, largest);
}

}  // namespace libflash::cuda::sm80
