// The softmax of a consumer thread of the sm_90a forward kernel for wide heads: as in decode, but the scores are in base-2 units
// already, and bf16 has other kept maxima.
#pragma once

#include "cuda/sm90/decode_softmax.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardWideSoftmax : DecodeSoftmax<Traits> {
    using Scores = typename DecodeSoftmax<Traits>::Scores;
    using DecodeSoftmax<Traits>::kScores;

    // A new kept maximum is the largest score plus kLift. It is raised when a score exceeds it by more than kSlack. With bf16 no
    // probability exceeds 1, so that sums of large values do not overflow; `half` would have too few bits for small ones.
    static constexpr bool kHalf = std::is_same<typename Traits::T, __half>::value;
    static constexpr float kLift = kHalf ? 0.0f : 8.0f, kSlack = kHalf ? 8.0f : 0.0f;

    // From scores to P. Returns whether a kept maximum was raised.
    __device__ __forceinline__ bool exponentiate(Scores& s) {
        const bool raised = raise_maxima(s);
        float part[2][2] = {};  // partial sums, so that the row sums are rounded less often
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const int r = i / 2 % 2;
            s[i] = exp2_approx(s[i] - this->kept_maximum[r]);
            part[r][i % 2] += s[i];
        }
        this->sum[0] += part[0][0] + part[0][1];
        this->sum[1] += part[1][0] + part[1][1];
        return raised;
    }

private:
    // Maxima ignore NaN: a row with NaN must not change how other rows are computed.
    __device__ __forceinline__ bool raise_maxima(const Scores& s) {
        float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int i = 0; i < kScores; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
        bool exceeds = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) exceeds |= largest[r] - this->kept_maximum[r] > kSlack;
        if (!__any_sync(0xffffffffu, exceeds)) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            this->factor[r] = raise_kept_maximum(this->kept_maximum[r], quad_max(largest[r]) + kLift);
            this->sum[r] *= this->factor[r];
        }
        return true;
    }
};

}  // namespace libflash::cuda::sm90
