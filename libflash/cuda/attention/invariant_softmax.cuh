// Invariant rows: the arithmetic of the softmax, which the decode kernel of sm80 and the prefill kernel of sm90 share, so that a
// row has the same bits in both. Keys are processed in units of kInvariantUnit at multiples of it, from the last unit of a
// segment to the first, and segments (invariant_segments.h) from the last to the first.
//
// The rule for a row in a unit. s: the row's scores before scaling, which four lanes share as in an accumulator
// (tile/accumulator.cuh).
// - If the row has no kept maximum yet, the kept maximum becomes the largest s times the scale. Otherwise it is unchanged.
// - p = exp2(fma(s, scale, -maximum)). Each lane adds up its p in the order of its elements, separately for even and odd
// elements; then it adds these two sums, and adds the result to its sum of the segment.
// - If the sum of a lane exceeds kSumLimit, the kept maximum is raised by a whole number and p, sums and accumulators are
//   multiplied by a power of two. If it exceeds kSumOverflow, the unit is recomputed with the largest score as the maximum.
// - With a maximum beyond kMaximumLimit, whose rounding errors are large, the product with the scale is rounded first.
// The cases of kSumOverflow and kMaximumLimit are rare, and detecting them in advance costs time. So there is a fast path, which
// computes no maximum after the first unit of a segment, and a careful path, which obeys the whole rule. If is_unsafe() is false
// after the fast path, both have the same bits. If it is true, decode repeats the unit and prefill repeats the work tile, both
// with the careful path.
//
// Products before a sum are rounded explicitly: otherwise the compiler could contract them to an FMA in one kernel and not in the
// other.
#pragma once

#include "cuda/attention/online_softmax.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/quad.cuh"

#include <cstdint>

namespace libflash::cuda {

constexpr float kSumOverflow = 1.152921504606846976e18f;  // 2^60

template <int kKeys>
struct InvariantSoftmax {
    static constexpr int kScores = kKeys / 2;  // of a lane: elements i with i / 2 % 2 == r belong to its row r
    using Scores = float[kScores];

    float kept_maximum[2];  // in base-2 units; kNoScore: no score of the segment yet
    float sum[2];           // of this lane's elements
    uint32_t flags;         // kNeedsMaximum: a row of this warp has no score yet; kUnsafe << r: see is_unsafe(r)
    static constexpr uint32_t kNeedsMaximum = 1, kUnsafe = 2;

    __device__ __forceinline__ void clear() {
        flags = 0;
        begin_segment();
    }
    // Called after the results of the previous segment have been used. kUnsafe flags remain set.
    __device__ __forceinline__ void begin_segment() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            kept_maximum[r] = kNoScore;
            sum[r] = 0.0f;
        }
        flags |= kNeedsMaximum;
    }
    // Returns the sum of row r over its lanes, in all lanes.
    __device__ __forceinline__ float end_segment(int r) {
        note(r, sum[r] > kSumOverflow);
        return quad_sum(sum[r]);
    }

    // Turns the scores of a unit into probabilities. Returns true if the accumulators must be multiplied by `factor`.
    __device__ __forceinline__ bool apply(Scores& s, float scale, bool careful, float (&factor)[2]) {
        const bool raised = careful || (flags & kNeedsMaximum) != 0;
        factor[0] = factor[1] = 1.0f;
        if (raised) raise_to_maximum(s, scale, careful, factor);
        exponentiate(s, scale, careful);
        // False for a NaN sum: a row with NaN must not change how other rows are computed.
        const bool rescale = __any_sync(0xffffffffu, sum[0] > kSumLimit || sum[1] > kSumLimit);
        if (rescale) rescale_large_sums(s, factor);
        return raised || rescale;
    }

    // Whether the fast path may have violated the rule in row r since clear(); the lanes of a row may differ.
    __device__ __forceinline__ bool is_unsafe(int r) const { return (flags >> r & kUnsafe) != 0 || sum[r] > kSumOverflow; }

private:
    __device__ __forceinline__ void note(int r, bool unsafe) { flags |= unsafe ? kUnsafe << r : 0u; }
    __device__ __forceinline__ static bool is_large(float maximum) {
        return fabsf(maximum) > kMaximumLimit && maximum != kNoScore;
    }

    __device__ __forceinline__ float probability(float s, float scale, bool careful, int r) const {
        if (careful && is_large(kept_maximum[r])) return exp2_approx(__fmul_rn(s, scale) - kept_maximum[r]);
        return exp2_approx(fmaf(s, scale, -kept_maximum[r]));
    }

    // A NaN leaves the kept maximum of its row unchanged and does not set kNeedsMaximum.
    __device__ __forceinline__ void raise_to_maximum(const Scores& s, float scale, bool careful, float (&factor)[2]) {
        bool no_score = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = s[2 * r];
#pragma unroll
            for (int i = 0; i < kScores; i += 4) largest = max_or_nan(largest, max_or_nan(s[i + 2 * r], s[i + 2 * r + 1]));
            largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            const bool overflows = careful && quad_max(sum_with(s, scale, r)) > kSumOverflow;
            if (kept_maximum[r] == kNoScore || overflows) {
                factor[r] = raise_kept_maximum(kept_maximum[r], largest * scale);
                sum[r] = __fmul_rn(sum[r], factor[r]);
            }
            note(r, !careful && is_large(kept_maximum[r]));
            no_score |= kept_maximum[r] == kNoScore && largest == largest;
        }
        flags &= ~kNeedsMaximum;
        flags |= __any_sync(0xffffffffu, no_score) ? kNeedsMaximum : 0u;
    }

    // What the sum of row r would be with the current maximum.
    __device__ __forceinline__ float sum_with(const Scores& s, float scale, int r) const {
        float part[2] = {};
#pragma unroll
        for (int i = 2 * r; i < kScores; i += 4) {
            part[0] += probability(s[i], scale, true, r);
            part[1] += probability(s[i + 1], scale, true, r);
        }
        return sum[r] + (part[0] + part[1]);
    }

    __device__ __forceinline__ void exponentiate(Scores& s, float scale, bool careful) {
        float part[2][2] = {};
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const int r = i / 2 % 2;
            s[i] = probability(s[i], scale, careful, r);
            part[r][i % 2] += s[i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] += part[r][0] + part[r][1];
    }

    // The lanes of a row must agree, so they use the largest of their sums.
    __device__ __forceinline__ void rescale_large_sums(Scores& s, float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float largest = quad_max(sum[r]);
            if (!(largest > kSumLimit && largest <= kSumOverflow)) continue;
            const float scale = raise_kept_maximum_by_sum(kept_maximum[r], largest);
            note(r, is_large(kept_maximum[r]));
            sum[r] = __fmul_rn(sum[r], scale);
            factor[r] *= scale;
#pragma unroll
            for (int i = 2 * r; i < kScores; i += 4) {
                s[i] *= scale;
                s[i + 1] *= scale;
            }
        }
    }
};

// The softmax of the segments of a row that have been folded.
struct InvariantFold {
    // The factors of the accumulators of the folded segments and of the new segment. The accumulators of a segment of which the
    // row sees no key are zeros.
    struct Factors {
        float folded = 1.0f, added = 0.0f;

        // As add_scaled_and_clear().
        __device__ __forceinline__ float of(float folded_o, float o) const { return fmaf(o, added, __fmul_rn(folded_o, folded)); }
    };

    float maximum = kNoScore, sum = 0.0f;

    // `segment_sum`: the sum over all lanes.
    __device__ __forceinline__ Factors add(float segment_maximum, float segment_sum) {
        Factors factors;
        if (segment_sum == 0.0f) return factors;
        const float raised = fmaxf(maximum, segment_maximum);
        factors.folded = exp2_approx(maximum - raised);
        factors.added = exp2_approx(segment_maximum - raised);
        sum = fmaf(segment_sum, factors.added, __fmul_rn(sum, factors.folded));
        maximum = raised;
        return factors;
    }

    // The factor for the accumulators, 0 if the row sees no key, and the LSE. `sink`: in base-2 units, or -infinity.
    struct Result {
        float factor, lse;
    };
    __device__ __forceinline__ Result result(float sink) const {
        const float largest = fmaxf(maximum, sink), factor = exp2_approx(maximum - largest);
        const float total = fmaf(sum, factor, exp2_approx(sink - largest));
        // A row with NaN stays NaN: a NaN sum is not equal to 0.
        if (total == 0.0f) return {0.0f, -INFINITY};
        return {__fdividef(factor, total), (largest + __log2f(total)) * kLn2};
    }
};

}  // namespace libflash::cuda
