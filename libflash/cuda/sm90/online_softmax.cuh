// The softmax of a tile walk over the accumulators of a warpgroup: each thread has a share of two rows, elements i with i / 2 % 2 == r, and four
// lanes share a row.
//
// Any finite number may be subtracted from a row's scores; the maximum is merely the safe choice. It is taken in the first tile and in tiles with a
// mask, and kept for the others: matrix instructions leave the other units so little of the register file that a comparison costs as much as
// an exponential. A row whose sum has grown past kSumLimit is brought back to size at once, before probabilities are rounded. Only a jump by about
// 88 (natural units) within one tile overflows; needs_maxima() says so at the end, and the work is done once more with the maximum of every tile.
#pragma once

#include "cuda/ptx/math.cuh"

namespace libflash::cuda::sm90 {

// Below every score, and yet finite: differences with it are never NaN.
constexpr float kNoScore = -3.402823466e38f;

template <int kBlockN>
struct OnlineSoftmax {
    static constexpr int kScores = kBlockN / 2;
    static constexpr float kSumLimit = 16384.0f;  // and of a probability: `half` ends at 65504
    static constexpr float kBaseLimit =
        134217728.0f;  // 2^27: half a unit in the last place is 4, and its rounding could overflow the exponential
    float base[2];     // what is subtracted, in base-2 units; kNoScore: no score yet
    float sum[2];      // this lane's share
    bool has_nothing;  // a row of this warp: it needs the maximum of the next tile

    __device__ __forceinline__ void clear() {
        base[0] = base[1] = kNoScore;
        sum[0] = sum[1] = 0.0f;
        has_nothing = true;
    }

    // Scores to probabilities. `scale` makes base-2 units of them. True: what has been summed up so far is to be multiplied by `factor`.
    __device__ __forceinline__ bool apply(float (&s)[kScores], float scale, bool take_maximum, float (&factor)[2]) {
        const bool moved = take_maximum || has_nothing;
        factor[0] = factor[1] = 1.0f;
        if (moved) raise_to_maximum(s, scale, factor);
        exponentiate(s, scale);
        const bool past =
            __any_sync(0xffffffffu, sum[0] > kSumLimit || sum[1] > kSumLimit);  // NaN is not: its neighbours stay as they are
        if (past) shrink(s, factor);
        return moved || past;
    }

    // Adds up a row's sums over its lanes; says whether it has overflowed on the way.
    __device__ __forceinline__ bool finish(int r) {
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        return sum[r] == INFINITY || (fabsf(base[r]) > kBaseLimit && base[r] != kNoScore);
    }

private:
    // A row with a NaN has no maximum: whatever it is will not change how its neighbours are done.
    __device__ __forceinline__ void raise_to_maximum(const float (&s)[kScores], float scale, float (&factor)[2]) {
        bool nothing = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = s[2 * r];
#pragma unroll
            for (int i = 0; i < kScores; i += 4) largest = max_or_nan(largest, max_or_nan(s[i + 2 * r], s[i + 2 * r + 1]));
            largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            const float raised = fmaxf(base[r], largest * scale);  // -infinity and NaN leave it as it was
            factor[r] = exp2_approx(base[r] - raised);
            sum[r] *= sum[r] == INFINITY ? 1.0f : factor[r];  // an overflow is remembered
            base[r] = raised;
            nothing |= raised == kNoScore && largest == largest;
        }
        has_nothing = __any_sync(0xffffffffu, nothing);
    }

    __device__ __forceinline__ void exponentiate(float (&s)[kScores], float scale) {
        float part[2][2] = {};
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const int r = i / 2 % 2;
            s[i] = exp2_approx(fmaf(s[i], scale, -base[r]));
            part[r][i % 2] += s[i];
        }
        sum[0] += part[0][0] + part[0][1];
        sum[1] += part[1][0] + part[1][1];
    }

    // Rows with large sums get a higher base. The lanes of a row must agree on it, so they agree on the sum first.
    __device__ __forceinline__ void shrink(float (&s)[kScores], float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = fmaxf(sum[r], __shfl_xor_sync(0xffffffffu, sum[r], 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            if (!(largest > kSumLimit && largest < INFINITY)) continue;
            const float up = fminf(ceilf(__log2f(largest)), 126.0f), down = exp2_approx(-up);  // 2^-127 would be 0
            base[r] += up;
            sum[r] *= down;
            factor[r] *= down;
#pragma unroll
            for (int i = 2 * r; i < kScores; i += 4) {
                s[i] *= down;
                s[i + 1] *= down;
            }
        }
    }
};

}  // namespace libflash::cuda::sm90
