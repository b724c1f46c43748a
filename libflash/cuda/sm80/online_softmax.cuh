// Online softmax with a kept maximum, in the registers of a warp: scores, row sums and O accumulators of kSlabs * 16 query
// rows. Row r (0 or 1) of a slab has accumulator elements 2 * r and 2 * r + 1; four lanes share a row.
//
// attention/online_softmax.cuh describes the kept maximum. Here it is the row maximum of the first tile, and edge tiles raise it.
// All other tiles leave it unchanged: a score costs one multiply-add, one exponential and one addition, and the accumulators are
// not rescaled. After a tile, a row whose sum exceeds kSumLimit gets a higher kept maximum (rescale_large_sums).
//
// Overflow is possible only if the scores of a row jump by about 75 (natural units) within one tile, or by less if V has large
// elements. It is detected after the last tile; the thread block then repeats its work and updates the maximum for every tile.
// `half` probabilities already overflow at 65504. So for `half` every tile is checked for scores that are too far above the kept
// maximum (any_too_large); if there are any, the kept maximum is updated.
//
// The kept maximum is a rounded product (maximum * scale) and the same for all tiles, so its rounding error cancels. If a kept
// maximum is so large that its rounding error could make the exponential overflow, the thread block also repeats its work, and
// then scales the scores before it computes their maximum.
#pragma once

#include "cuda/attention/online_softmax.cuh"
#include "cuda/attention/row_statistics.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/quad.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

// kStatistics: with the statistics of the rows (attention/row_statistics.cuh).
template <int kSlabs, int kKeyBlocks, int kChannelBlocks, bool kStatistics = false>
struct OnlineSoftmax : std::conditional_t<kStatistics, RowStatistics<kSlabs>, NoRowStatistics> {
    static constexpr float kHalfLimit = 15.0f;  // largest exponent (base 2) of a probability

    float scale;  // from the scores in registers to base-2 units: scale_log2, or 1 if they are scaled already

    float s[kSlabs][kKeyBlocks][4];      // scores, then probabilities
    float o[kSlabs][kChannelBlocks][4];  // sums of p * v, not normalized
    float kept_maximum[kSlabs][2];       // subtracted from the scores, in base-2 units; kNoScore: no score yet
    float row_sum[kSlabs][2];

    // Converts the scores of two adjacent 8-column blocks to probabilities and adds these to the row sums. One call processes
    // part `share` of kShares of the rows, so that a caller can interleave the calls with products.
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
                    if constexpr (kStatistics) {
                        const float score = s[a][n][e] * scale, exponent = score - kept_maximum[a][r];
                        s[a][n][e] = exp2_approx(exponent);
                        this->add_score(a, r, score, exponent, s[a][n][e]);
                    } else {
                        s[a][n][e] = exp2_approx(fmaf(s[a][n][e], scale, -kept_maximum[a][r]));
                    }
                    sum += s[a][n][e];
                }
            }
            row_sum[a][r] += sum;
        }
    }

    // Maximum of this lane's scores of a row.
    __device__ __forceinline__ float largest_of(int a, int r) const {
        float largest = s[a][0][2 * r];
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) largest = fmaxf(largest, fmaxf(s[a][n][2 * r], s[a][n][2 * r + 1]));
        return largest;
    }

    // Maximum over the four lanes of the row.
    __device__ __forceinline__ float row_largest(int a, int r) const { return quad_max(largest_of(a, r)); }

    // Raises the kept maximum to the row maximum `largest` (unscaled) and rescales the row's sum and accumulators.
    __device__ __forceinline__ void raise_kept_maximum(int a, int r, float largest) {
        if constexpr (kStatistics) {
            const float before = kept_maximum[a][r];
            const float factor = cuda::raise_kept_maximum(kept_maximum[a][r], largest * scale);
            this->rescale_weighted(a, r, row_sum[a][r], before - kept_maximum[a][r], factor);
            scale_row(a, r, factor);
        } else {
            scale_row(a, r, cuda::raise_kept_maximum(kept_maximum[a][r], largest * scale));
        }
    }

    // Raises the kept maximum of every row to the row's maximum in this tile.
    __device__ __forceinline__ void update_max() {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) raise_kept_maximum(a, r, row_largest(a, r));
    }

    __device__ __forceinline__ void scale_row(int a, int r, float factor) {
        scale_row_sum(row_sum[a][r], factor);
#pragma unroll
        for (int n = 0; n < kChannelBlocks; ++n) {
            o[a][n][2 * r] *= factor;
            o[a][n][2 * r + 1] *= factor;
        }
    }

    // Whether a row sum of this warp exceeds the limit.
    __device__ __forceinline__ bool sums_past_limit() const {
        bool past = false;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a) past |= row_sum[a][0] > kSumLimit || row_sum[a][1] > kSumLimit;
        return __any_sync(0xffffffffu, past);
    }

    // Maximum of the partial sums of the row's lanes.
    __device__ __forceinline__ float row_largest_sum(int a, int r) const { return quad_max(row_sum[a][r]); }

    // Raises the kept maximum of a row with a large sum. `sum` must be the same in all lanes of the row.
    __device__ __forceinline__ void rescale_large_sum(int a, int r, float sum) {
        if constexpr (kStatistics) {
            if (!(sum > kSumLimit && sum < INFINITY)) return;
            const float before = kept_maximum[a][r], factor = raise_kept_maximum_by_sum(kept_maximum[a][r], sum);
            this->rescale_weighted(a, r, row_sum[a][r], before - kept_maximum[a][r], factor);
            scale_row(a, r, factor);
        } else {
            if (sum > kSumLimit && sum < INFINITY) scale_row(a, r, raise_kept_maximum_by_sum(kept_maximum[a][r], sum));
        }
    }

    __device__ __forceinline__ void rescale_large_sums() {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) rescale_large_sum(a, r, row_largest_sum(a, r));
    }

    // True if an element of o is not finite while the row sum is not NaN: with probabilities far above 1 a sum of p * v can
    // overflow. The row sums must already be added up over the lanes of the row.
    __device__ __forceinline__ bool values_overflowed() const {
        bool bad = false;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float trace[2] = {};  // 0 if all elements are finite, else NaN
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
            kept_maximum[a][0] = kept_maximum[a][1] = kNoScore;
            row_sum[a][0] = row_sum[a][1] = 0.0f;
        }
        if constexpr (kStatistics) this->clear_statistics();
    }

    // For `half`: true if a score of this warp is so far above the kept maximum that its probability could overflow.
    __device__ __forceinline__ bool any_too_large() const {
        bool large = false;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                large |= fmaf(largest_of(a, r), scale, -kept_maximum[a][r]) > kHalfLimit;
            }
        return __any_sync(0xffffffffu, large);
    }
};

}  // namespace libflash::cuda::sm80
