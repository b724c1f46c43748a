// The softcap of scores from products in 16 bits. Its tanh has an absolute instead of a relative error: for the softmax only the
// absolute error of a score counts.
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/reciprocal.cuh"

namespace libflash::cuda {

// Up to this cap the error of a score is at most 5e-5. The rounding of P to 16 bits alone has an error of 2e-4.
constexpr float kLargestQuickCap = 128.0f;

// As scale_and_cap().
template <class ForAll>
__device__ __forceinline__ void scale_and_cap_quickly(const RareParams& rare, float softmax_scale, const ForAll& for_all) {
    const float cap = rare.softcap;
    if (!(cap > 0.0f && cap <= kLargestQuickCap)) return scale_and_cap(rare, softmax_scale, for_all);
    // cap * tanh(x) = cap - 2 cap / (1 + exp(2 x))
    const float exponent = 2.0f * kLog2e * softmax_scale / cap;
    for_all(
        [&](float& score, int, int) { score = fmaf(-2.0f * cap, reciprocal_approx(1.0f + exp2_approx(score * exponent)), cap); });
}

}  // namespace libflash::cuda
