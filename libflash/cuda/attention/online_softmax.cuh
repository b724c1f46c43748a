// Online softmax: the steps for one row, which the kernels share. The loops over scores and accumulators are in the kernels,
// because they are interleaved with matrix products in different ways.
//
// Softmax allows any finite number to be subtracted from the scores of a row. The row maximum is the safe choice. The kernels
// compute it where it costs little and keep it for the other tiles (the kept maximum, in base-2 units), so that most tiles need
// no maximum and no rescaling of the sums. A row whose sum grows too large gets a higher kept maximum. A row that overflows
// nevertheless is detected at the end, and recomputed with the maximum of every tile.
#pragma once

#include "cuda/ptx/math.cuh"

namespace libflash::cuda {

// The kept maximum of a row without scores: less than every score, but finite, so that differences from it are never NaN.
constexpr float kNoScore = -3.402823466e38f;
// A row with a larger sum gets a higher kept maximum, but not if the sum is NaN: a row with NaN must not change how other rows
// are computed. The limit also bounds the probabilities: the largest `half` is 65504.
constexpr float kSumLimit = 16384.0f;
// 2^27: half a unit in the last place is 4 there. The rounding error of a larger kept maximum could make the exponential
// overflow. A row must be recomputed, with the maximum of every tile, if its sum is infinite, or if it has scores and its kept
// maximum exceeds this limit. Each kernel repeats this condition in its own code: a common function would be compiled to other
// branches.
constexpr float kMaximumLimit = 134217728.0f;

// Raises the kept maximum of a row to the maximum `largest` of new scores. Returns the factor for the sums of the row.
// -infinity and NaN leave the kept maximum unchanged.
__device__ __forceinline__ float raise_kept_maximum(float& kept_maximum, float largest) {
    const float raised = fmaxf(kept_maximum, largest);
    const float factor = exp2_approx(kept_maximum - raised);
    kept_maximum = raised;
    return factor;
}

// Multiplies a row sum by such a factor. An infinite sum stays infinite, so that the overflow is detected: infinity * 0 would be
// NaN.
__device__ __forceinline__ void scale_row_sum(float& sum, float factor) { sum *= sum == INFINITY ? 1.0f : factor; }

// Raises the kept maximum of a row with a large finite sum, so that the sum becomes about 1. Returns the factor for the sums. All
// lanes of a row need the same kept maximum, so `sum` must be the same in all of them.
__device__ __forceinline__ float raise_kept_maximum_by_sum(float& kept_maximum, float sum) {
    const float up = fminf(ceilf(__log2f(sum)), 126.0f);  // 2^-127 would be flushed to 0
    kept_maximum += up;
    return exp2_approx(-up);
}

}  // namespace libflash::cuda
