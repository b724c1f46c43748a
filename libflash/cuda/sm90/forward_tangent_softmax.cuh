// The softmax of the sm_90a forward_tangent kernel and its tangent, over the scores s and their tangents ts of a warpgroup. Each
// thread holds parts of two rows, r = 0 and 1 (tile/accumulator.cuh).
//
//   p = exp(s - kept)      sum += p      p ts: p (ts - pivot)      mean += p (ts - pivot)
//
// `kept` is any number that keeps p in range. Fused with forward it is close to the largest score so far, and raised only when a
// score exceeds it by kMargin, because raising it rescales the sums. From saved LSE it is the LSE. With `half` it is lower, so
// that p has more digits, and it is raised where p (ts - pivot) would overflow. The pivot of a row is the mean of its tangents
// over the first tile that it sees.
#pragma once

#include "cuda/attention/online_softmax.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/nanosleep.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

template <int kBlockN, bool kFused, bool kHalf>
struct TangentSoftmax {
    static constexpr int kScores = kBlockN / 2;
    // Base-2 logarithms: of the largest p when `kept` was last raised, and how much larger p may become. From saved LSE p is at
    // most 2^kHeadroom.
    static constexpr float kHeadroom = kHalf ? (kFused ? 10.0f : 14.0f) : 0.0f, kMargin = kHalf ? 4.0f : 8.0f;
    static constexpr float kHalfLimit = 32768.0f;
    using Scores = float[kScores];

    float kept[2];       // in base-2 units; kNoScore: no score yet
    float sum[2];        // of this lane's elements; from saved LSE: of the whole row, with the sink
    float mean[2];       // of this lane's elements
    float pivot[2];      // in natural units
    uint32_t unstarted;  // bit r: the row has no pivot yet

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            kept[r] = kNoScore;
            sum[r] = mean[r] = pivot[r] = 0.0f;
        }
        unstarted = 3;
    }
    // From saved LSE in base-2 units; +infinity: the row does not take part.
    __device__ __forceinline__ void keep_lse(int r, float lse_log2) {
        kept[r] = lse_log2 - kHeadroom;
        if constexpr (kHalf) sum[r] = exp2_approx(lse_log2 - kept[r]);
    }
    // The sum of the probabilities of a row, over 2^kept.
    __device__ __forceinline__ float sum_of_row(int r) const {
        if constexpr (kFused) return quad_sum(sum[r]);
        return kHalf ? sum[r] : 1.0f;  // otherwise the kept number is the LSE
    }

    // Turns s into p. s is to be multiplied by `scale_log2`, to base-2 units; hidden scores are -infinity. Returns true if the
    // sums of products must be multiplied by `factor`.
    __device__ __forceinline__ bool exponentiate(Scores& s, float scale_log2, float (&factor)[2]) {
        factor[0] = factor[1] = 1.0f;
        bool raised = false;
        if constexpr (kFused) raised = raise_to_maximum(s, scale_log2, factor);
        float scales[2] = {scale_log2, scale_log2};
        if (kFused && __any_sync(0xffffffffu, has_large(0) || has_large(1))) round_large(s, scales);
        float sums[2] = {};
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const int r = i / 2 % 2;
            s[i] = exp2_approx(fmaf(s[i], scales[r], -kept[r]));
            if constexpr (kFused) sums[r] += s[i];
        }
        if constexpr (kFused) {
#pragma unroll
            for (int r = 0; r < 2; ++r) sum[r] += sums[r];
        }
        return raised;
    }
    // Turns ts into p (ts - pivot), after exponentiate(). ts is to be multiplied by `scale`. `edge`: scores of the tile are
    // hidden, and their tangents may be anything. Returns true if the sums of products must be multiplied by `factor`, which
    // exponentiate() has set.
    __device__ __forceinline__ bool multiply_tangents(Scores& s, Scores& ts, float scale, bool edge, float (&factor)[2]) {
        if (edge) {
#pragma unroll
            for (int i = 0; i < kScores; ++i)
                if (s[i] == 0.0f) ts[i] = 0.0f;
        }
        if (__any_sync(0xffffffffu, unstarted != 0)) choose_pivots(s, ts, scale);
        float means[2] = {};
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const int r = i / 2 % 2;
            ts[i] = s[i] * fmaf(ts[i], scale, -pivot[r]);
            means[r] += ts[i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) mean[r] += means[r];
        if constexpr (kHalf) return raise_for_half(s, ts, factor);
        return false;
    }
    // Without a branch that depends on all elements of a tile the compiler computes most of them after the products that they
    // should overlap. This one is hardly ever taken, and of no consequence. `last`: what is computed last.
    __device__ __forceinline__ static void finish_before_wait(const float (&last)[2]) {
        if (__any_sync(0xffffffffu, last[0] + last[1] == INFINITY)) nanosleep(1);
    }

private:
    // Raises `kept` of rows whose scores exceed it by more than kMargin. A NaN changes nothing here.
    __device__ __forceinline__ bool raise_to_maximum(Scores& s, float scale_log2, float (&factor)[2]) {
        float largest[2];
        bool exceeds = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = -INFINITY;
#pragma unroll
            for (int i = 2 * r; i < kScores; i += 4) largest[r] = fmaxf(largest[r], fmaxf(s[i], s[i + 1]));
            largest[r] = quad_max(largest[r]) * scale_log2;
            exceeds |= largest[r] - kept[r] > kHeadroom + kMargin;
        }
        const bool raises = __any_sync(0xffffffffu, exceeds);
        if (raises) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (!(largest[r] - kept[r] > kHeadroom + kMargin)) continue;
                const float raised = largest[r] - kHeadroom;
                factor[r] = exp2_approx(kept[r] - raised);
                kept[r] = raised;
                sum[r] *= factor[r];
                mean[r] *= factor[r];
            }
        }
        return raises;
    }

    // Keys whose probability is 0 do not count.
    __device__ __forceinline__ void choose_pivots(const Scores& s, const Scores& ts, float scale) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float seen = 0.0f, total = 0.0f;
#pragma unroll
            for (int i = 2 * r; i < kScores; i += 4) {
                seen += (s[i] == 0.0f ? 0.0f : 1.0f) + (s[i + 1] == 0.0f ? 0.0f : 1.0f);
                total += ts[i] + ts[i + 1];
            }
            seen = quad_sum(seen);
            total = quad_sum(total);
            if (!(unstarted >> r & 1) || seen == 0.0f) continue;
            pivot[r] = __fdividef(total, seen) * scale;
            unstarted &= ~(1u << r);
        }
    }

    // The rounding error of a large `kept` could make the exponential overflow. Therefore such rows round the scores in base-2
    // units before `kept` is subtracted: `kept` was computed from a score that was rounded in the same way.
    __device__ __forceinline__ bool has_large(int r) const { return fabsf(kept[r]) > kMaximumLimit && kept[r] != kNoScore; }
    __device__ __forceinline__ void round_large(Scores& s, float (&scales)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!has_large(r)) continue;
#pragma unroll
            for (int i = 2 * r; i < kScores; i += 4) {
                s[i] *= scales[r];
                s[i + 1] *= scales[r];
            }
            scales[r] = 1.0f;
        }
    }

    // Raises `kept` of rows with p (ts - pivot) that `half` could not hold.
    __device__ __forceinline__ bool raise_for_half(Scores& s, Scores& ts, float (&factor)[2]) {
        float largest[2];
        bool exceeds = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = 0.0f;
#pragma unroll
            for (int i = 2 * r; i < kScores; i += 4) largest[r] = fmaxf(largest[r], fmaxf(fabsf(ts[i]), fabsf(ts[i + 1])));
            largest[r] = quad_max(largest[r]);
            exceeds |= largest[r] > kHalfLimit;
        }
        const bool raises = __any_sync(0xffffffffu, exceeds);
        if (raises) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (largest[r] > kHalfLimit) raise(s, ts, r, fminf(ceilf(__log2f(largest[r]) - 14.0f), 126.0f), factor);
            }
        }
        return raises;
    }
    __device__ __forceinline__ void raise(Scores& s, Scores& ts, int r, float by, float (&factor)[2]) {
        const float scale = exp2_approx(-by);
        kept[r] += by;
        sum[r] *= scale;
        mean[r] *= scale;
        factor[r] *= scale;
#pragma unroll
        for (int i = 2 * r; i < kScores; i += 4) {
            s[i] *= scale;
            s[i + 1] *= scale;
            ts[i] *= scale;
            ts[i + 1] *= scale;
        }
    }
};

}  // namespace libflash::cuda::sm90
