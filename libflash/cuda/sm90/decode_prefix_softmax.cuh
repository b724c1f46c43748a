// The softmax of a consumer thread of the sm_90a kernel for keys that sequences share, for its two rows. The steps and their
// order are those of sm80/decode_prefix.cuh, so the sums have the same bits.
#pragma once

#include "cuda/attention/online_softmax.cuh"
#include "cuda/attention/shared_prefix.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodePrefixSoftmax {
    using T = typename Traits::T;
    static constexpr int kScores = Traits::kBlockN / 2, kOfUnit = Traits::kUnit / 2;
    using Scores = float[kScores];
    using Weights = uint32_t[Traits::kUnits][4];  // P, an A operand for each unit

    float kept_maximum[2], row_sum[2];
    uint64_t voters[2];

    // `row`: the thread's first row in its slab; exists[r]: whether row r exists.
    __device__ __forceinline__ void begin(const DecodeParams& params, int row, const bool (&exists)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            voters[r] = voters_of_row(params, row + 8 * r);
            // The scores of rows that do not exist are at most 0 and never raise a kept maximum of 0.
            kept_maximum[r] = exists[r] ? kNoScore : 0.0f;
            row_sum[r] = 0.0f;
        }
    }

    // Whether a score exceeds a kept maximum of the thread by too much.
    __device__ __forceinline__ bool exceeds(const Scores& s) const {
        float largest[2] = {s[0], s[2]};
#pragma unroll
        for (int i = 0; i < kScores; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
        return is_high(largest[0], 0) || is_high(largest[1], 1);
    }

    // Raises kept maxima by the first unit of `s`. Returns whether the accumulators must be multiplied by `factor`.
    __device__ __forceinline__ bool raise(const Scores& s, float (&factor)[2]) {
        float largest[2] = {s[0], s[2]};
#pragma unroll
        for (int i = 0; i < kOfUnit; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
        const uint32_t low = __ballot_sync(0xffffffffu, is_high(largest[0], 0)),
                       high = __ballot_sync(0xffffffffu, is_high(largest[1], 1));
        const uint64_t votes = uint64_t{high} << 32 | low;
        if (!votes) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float raised = quad_max(largest[r]);
            if (!(votes & voters[r])) raised = kept_maximum[r];
            factor[r] = raise_kept_maximum(kept_maximum[r], raised);
            row_sum[r] *= factor[r];
        }
        return true;
    }

    // Computes P of units [kFirst, kEnd).
    template <int kFirst, int kEnd>
    __device__ __forceinline__ void exponentiate(const Scores& s, Weights& p) {
#pragma unroll
        for (int i = 4 * kFirst; i < 4 * kEnd; ++i) {
            const float low = exp2_approx(s[2 * i] - kept_maximum[i % 2]), high = exp2_approx(s[2 * i + 1] - kept_maximum[i % 2]);
            row_sum[i % 2] += low;
            row_sum[i % 2] += high;
            p[i / 4][i % 4] = pack_pair(low, high, T());
        }
    }

private:
    __device__ __forceinline__ bool is_high(float score, int r) const { return score - kept_maximum[r] > kDecodeSlack; }
};

}  // namespace libflash::cuda::sm90
