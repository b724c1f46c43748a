// The softmax of a tile walk, and what it works on, in a thread's registers: scores, sums and accumulators of kSlabs times 16 query rows of a
// warp. forward.cuh says how the maximum is kept. Rows r = 0, 1 of a slab are those of accumulator elements 2 * r and 2 * r + 1; four lanes share
// a row.
#pragma once

#include "cuda/ptx/math.cuh"

namespace libflash::cuda::sm80 {

template <int kSlabs, int kKeyBlocks, int kChannelBlocks>
struct OnlineSoftmax {
    static constexpr float kSumLimit = 16384.0f;
    static constexpr float kHalfLimit = 15.0f;  // of the exponent of a probability
    // Below every score, and yet finite: differences with it are never NaN.
    static constexpr float kNoScore = -3.402823466e38f;

    float scale;  // from the scores in registers to base-2 units: scale_log2, or 1 where they have been scaled already

    float s[kSlabs][kKeyBlocks][4];      // scores, then probabilities
    float o[kSlabs][kChannelBlocks][4];  // sums of p v
    float base[kSlabs][2];               // what is subtracted, in base-2 units; kNoScore: no score yet
    float row_sum[kSlabs][2];

    // Part `share` of kShares of the scores of two neighbouring 8-column blocks to probabilities; adds them to the row sums.
    template <int kShares>
    __device__ __forceinline__ void exponentiate(int block, int share) {
        constexpr int kRows = kSlabs * 2;
#pragma unroll
        for (int i = share * kRows / kShares; i < (share + 1) * kRows / kShares; ++i) {
            const int a = i / 2, r = i % 2;
            float sum = 0.0f;
#pragma unroll
            for (int n = block; n < block + 2; ++n) {
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    s[a][n][e] = exp2_approx(fmaf(s[a][n][e], scale, -base[a][r]));
                    sum += s[a][n][e];
                }
            }
            row_sum[a][r] += sum;
        }
    }

    // The largest of this lane's scores of a row.
    __device__ __forceinline__ float largest_of(int a, int r) const {
        float largest = s[a][0][2 * r];
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) largest = fmaxf(largest, fmaxf(s[a][n][2 * r], s[a][n][2 * r + 1]));
        return largest;
    }

    // The same over the four lanes of the row.
    __device__ __forceinline__ float row_largest(int a, int r) const {
        float largest = largest_of(a, r);
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    }

    // Brings sum and accumulators of a row to the base that its largest score asks for.
    __device__ __forceinline__ void raise_base(int a, int r, float largest) {
        const float new_base = fmaxf(base[a][r], largest * scale);  // -infinity and NaN leave it as it was
        scale_row(a, r, exp2_approx(base[a][r] - new_base));
        base[a][r] = new_base;
    }

    // Takes the maximum of the tile into account.
    __device__ __forceinline__ void update_max() {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) raise_base(a, r, row_largest(a, r));
    }

    __device__ __forceinline__ void scale_row(int a, int r, float factor) {
        row_sum[a][r] *= row_sum[a][r] == INFINITY ? 1.0f : factor;  // an overflow is remembered
#pragma unroll
        for (int n = 0; n < kChannelBlocks; ++n) {
            o[a][n][2 * r] *= factor;
            o[a][n][2 * r + 1] *= factor;
        }
    }

    // Whether a row sum of this warp has grown past the limit. NaN is none of it: a row with one must not change how its neighbours are done.
    __device__ __forceinline__ bool sums_past_limit() const {
        bool past = false;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a) past |= row_sum[a][0] > kSumLimit || row_sum[a][1] > kSumLimit;
        return __any_sync(0xffffffffu, past);
    }

    // The largest of the sums that the lanes of a row have.
    __device__ __forceinline__ float row_largest_sum(int a, int r) const {
        float sum = row_sum[a][r];
        sum = fmaxf(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        return fmaxf(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
    }

    // Brings a row with a large sum back to size by moving its base up. All that have a part of the row must agree on the base, so they agree on
    // `sum` first.
    __device__ __forceinline__ void move_row_base(int a, int r, float sum) {
        if (sum > kSumLimit && sum < INFINITY) {
            const float up = fminf(ceilf(__log2f(sum)), 126.0f);  // 2^-127 would be 0, and the row lost
            base[a][r] += up;
            scale_row(a, r, exp2_approx(-up));
        }
    }

    __device__ __forceinline__ void move_base() {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) move_row_base(a, r, row_largest_sum(a, r));
    }

    // Whether a sum of p v is not finite though the row's sum, over all its lanes, is: with a probability far above 1 it may have gone past the end
    // of float on the way.
    __device__ __forceinline__ bool values_overflowed() const {
        bool bad = false;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float trace[2] = {};  // stays 0 as long as what it sees is finite
#pragma unroll
                for (int n = 0; n < kChannelBlocks; ++n) {
                    trace[0] = fmaf(o[a][n][2 * r], 0.0f, trace[0]);
                    trace[1] = fmaf(o[a][n][2 * r + 1], 0.0f, trace[1]);
                }
                bad |= trace[0] + trace[1] != 0.0f && row_sum[a][r] == row_sum[a][r];
            }
        return bad;
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a) {
#pragma unroll
            for (int n = 0; n < kChannelBlocks; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[a][n][e] = 0.0f;
            base[a][0] = base[a][1] = kNoScore;
            row_sum[a][0] = row_sum[a][1] = 0.0f;
        }
    }

    // Half precision: does any score of this warp lie so far above what is subtracted that its probability might not be finite?
    __device__ __forceinline__ bool any_too_large() const {
        bool large = false;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                large |= fmaf(largest_of(a, r), scale, -base[a][r]) > kHalfLimit;
            }
        return __any_sync(0xffffffffu, large);
    }
};

}  // namespace libflash::cuda::sm80
