// Online softmax over the score accumulators of a warpgroup. Each thread holds parts of two rows, r = 0 and 1
// (tile/accumulator.cuh).
//
// Any finite number may be subtracted from the scores of a row; the maximum is the safe choice. It is computed in the first tile
// and in edge tiles, and kept for the other tiles: wgmma leaves so little register file bandwidth that a comparison costs as much
// as an exponential. A row whose sum exceeds kSumLimit is rescaled at once, before its probabilities are rounded. Only a rise of
// the scores by about 88 (natural units) within one tile overflows; finish() reports this, and the work tile is recomputed with
// the maximum of every tile.
#pragma once

#include "cuda/attention/online_softmax.cuh"
#include "cuda/attention/row_statistics.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/largest_probability.cuh"
#include "cuda/tile/quad.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

// The statistics of rows that an instance computes. entropy: the largest score and the entropy. either: the entropy only if
// apply() has `weighs`.
enum class RowStatisticsKind { none, maxima, entropy, either };

template <bool kEntropy, bool kLongSums>
struct StatisticsOfRows : LargestProbability, std::conditional_t<kEntropy, EntropySums<1, kLongSums>, NoRowStatistics> {};

// kKind: the statistics of rows (attention/row_statistics.cuh). kShortOfRegisters: for an instance that would spill, or whose
// products the compiler would serialise.
template <int kBlockN, RowStatisticsKind kKind = RowStatisticsKind::none, bool kLongSums = false, bool kShortOfRegisters = false>
struct OnlineSoftmax : std::conditional_t<kKind == RowStatisticsKind::none, NoRowStatistics,
                                          StatisticsOfRows<(kKind > RowStatisticsKind::maxima), kLongSums>> {
    static constexpr int kScores = kBlockN / 2;
    static constexpr bool kMaxima = kKind != RowStatisticsKind::none, kEntropy = kKind > RowStatisticsKind::maxima,
                          kAlwaysWeighs = kKind == RowStatisticsKind::entropy;
    // Whether probabilities are compared as three integers, in fewer instructions and with more registers.
    static constexpr bool kOfThree = !kEntropy && !kShortOfRegisters;
    float kept_maximum[2];  // subtracted from the scores, in base-2 units; kNoScore: no score yet
    float sum[2];           // of this lane's elements
    bool needs_maximum;     // a row of this warp has no score yet: take the maximum of the next tile

    __device__ __forceinline__ void clear() {
        kept_maximum[0] = kept_maximum[1] = kNoScore;
        sum[0] = sum[1] = 0.0f;
        needs_maximum = true;
        if constexpr (kMaxima) this->clear_largest();
        if constexpr (kEntropy) this->clear_entropy();
    }

    // Turns scores into probabilities. `scale` converts scores to base-2 units. Returns true if the sums of P V must be
    // multiplied by `factor`. weighs: also computes the sums for the entropy. Then scores of -infinity make these sums NaN unless
    // take_maximum is true, and finish() reports an overflow.
    __device__ __forceinline__ bool apply(float (&s)[kScores], float scale, bool take_maximum, float (&factor)[2],
                                          [[maybe_unused]] bool weighs = false) {
        const bool raised = take_maximum || needs_maximum;
        factor[0] = factor[1] = 1.0f;
        if (raised) raise_to_maximum(s, scale, factor);
        if constexpr (!kEntropy) {
            exponentiate(s, scale);
        } else if (!weighs) {
            exponentiate(s, scale);
        } else if (take_maximum) {
            exponentiate_weighted<true>(s, scale);
        } else {
            exponentiate_weighted<false>(s, scale);
        }
        const bool rescale =
            // False for a NaN sum: a row with NaN must not change how other rows are computed.
            __any_sync(0xffffffffu, sum[0] > kSumLimit || sum[1] > kSumLimit);
        if (rescale) rescale_large_sums(s, factor);
        return raised || rescale;
    }

    // Adds up the sum of row r over its lanes. Returns true if the row overflowed.
    __device__ __forceinline__ bool finish(int r) {
        sum[r] = quad_sum(sum[r]);
        if constexpr (kMaxima) this->finish_row_largest(r);
        if constexpr (kEntropy) {
            this->finish_row_entropy(0, r);
            if (this->row_entropy_overflowed(0, r, sum[r])) return true;
        }
        return sum[r] == INFINITY || (fabsf(kept_maximum[r]) > kMaximumLimit && kept_maximum[r] != kNoScore);
    }
    // After finish(): the largest score of row r, in base-2 units; -infinity without scores. A row that overflowed has none.
    __device__ __forceinline__ float largest_score(int r) const { return kept_maximum[r] + this->log2_of_largest(r); }

private:
    // A NaN leaves the kept maximum of its row unchanged and does not set needs_maximum, so that it does not change how other
    // rows are computed.
    __device__ __forceinline__ void raise_to_maximum(const float (&s)[kScores], float scale, float (&factor)[2]) {
        bool no_score = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = s[2 * r];
#pragma unroll
            for (int i = 0; i < kScores; i += 4) largest = max_or_nan(largest, max_or_nan(s[i + 2 * r], s[i + 2 * r + 1]));
            largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            [[maybe_unused]] const float before = kept_maximum[r];
            factor[r] = raise_kept_maximum(kept_maximum[r], largest * scale);
            rescale_statistics(r, before, factor[r]);
            scale_row_sum(sum[r], factor[r]);
            no_score |= kept_maximum[r] == kNoScore && largest == largest;
        }
        needs_maximum = __any_sync(0xffffffffu, no_score);
    }

    // Called after the kept maximum of row r was raised from `before`, and before its sum is multiplied by `factor`.
    __device__ __forceinline__ void rescale_statistics([[maybe_unused]] int r, [[maybe_unused]] float before,
                                                       [[maybe_unused]] float factor) {
        if constexpr (kMaxima) this->rescale_largest(r, factor);
        if constexpr (kEntropy) this->rescale_weighted(0, r, sum[r], before - kept_maximum[r], factor);
    }

    __device__ __forceinline__ void exponentiate(float (&s)[kScores], float scale) {
        float part[2][2] = {};
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const int r = i / 2 % 2;
            s[i] = exp2_approx(fmaf(s[i], scale, -kept_maximum[r]));
            part[r][i % 2] += s[i];
            if constexpr (kMaxima)
                if (i % 2 == 1) this->template see_pair<kOfThree>(r, s[i - 1], s[i]);
        }
        sum[0] += part[0][0] + part[0][1];
        sum[1] += part[1][0] + part[1][1];
    }

    // As exponentiate(), with the sums for the entropy.
    template <bool kHidden>
    __device__ __forceinline__ void exponentiate_weighted(float (&s)[kScores], float scale) {
        float part[2][2] = {}, weighted_part[2][2] = {};
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const int r = i / 2 % 2;
            float exponent = fmaf(s[i], scale, -kept_maximum[r]);
            if constexpr (kHidden) exponent = max_or_nan(exponent, kLowestExponent);
            s[i] = exp2_approx(exponent);
            part[r][i % 2] += s[i];
            weighted_part[r][i % 2] = fmaf(s[i], exponent, weighted_part[r][i % 2]);
            if (i % 2 == 1) this->template see_pair<kOfThree>(r, s[i - 1], s[i]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += part[r][0] + part[r][1];
            this->weighted[0][r] += weighted_part[r][0] + weighted_part[r][1];
        }
    }

    // Raises the kept maximum of rows with large sums. The lanes of a row must have the same kept maximum, so they use the
    // largest of their sums.
    __device__ __forceinline__ void rescale_large_sums(float (&s)[kScores], float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float largest = quad_max(sum[r]);
            if (!(largest > kSumLimit && largest < INFINITY)) continue;
            [[maybe_unused]] const float before = kept_maximum[r];
            const float scale = raise_kept_maximum_by_sum(kept_maximum[r], largest);
            rescale_statistics(r, before, scale);
            sum[r] *= scale;
            factor[r] *= scale;
#pragma unroll
            for (int i = 2 * r; i < kScores; i += 4) {
                s[i] *= scale;
                s[i + 1] *= scale;
            }
        }
    }
};

}  // namespace libflash::cuda::sm90
