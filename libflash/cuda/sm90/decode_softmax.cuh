// The softmax of a consumer thread of the sm_90a decode kernels, for its two rows: kept maxima, sums, and P in registers.
#pragma once

#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/online_softmax.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/nanosleep.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodeSoftmax {
    using T = typename Traits::T;
    static constexpr int kScores = Traits::kBlockN / 2, kSteps = Traits::kBlockN / 16;
    static constexpr float kSlack = 8.0f;  // as in sm80: `half` can represent 2^8
    using Scores = float[kScores];
    using Fragments = uint32_t[kSteps][4];

    float kept_maximum[2], sum[2];
    float factor[2];  // for the accumulators, where a kept maximum was raised

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < 2; ++r) kept_maximum[r] = kNoScore, sum[r] = 0.0f;
    }

    // Turns dot products into P. Returns whether a kept maximum was raised.
    __device__ __forceinline__ bool exponentiate(Scores& s, float scale_log2) {
        const bool raised = raise_maxima(s, scale_log2);
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const int r = i / 2 % 2;
            s[i] = exp2_approx(fmaf(s[i], scale_log2, -kept_maximum[r]));
            sum[r] += s[i];
        }
        return raised;
    }
    __device__ __forceinline__ static void round(const Scores& s, Fragments& p) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) p[step][i] = pack_pair(s[8 * step + 2 * i], s[8 * step + 2 * i + 1], T());
    }

    // Keeps the compiler from moving the exponentials past a later wait for matrix products: the row sums decide a branch that is
    // never taken.
    __device__ __forceinline__ void finish_before_wait() const {
        if (__any_sync(0xffffffffu, sum[0] + sum[1] < 0.0f)) nanosleep(1);
    }

    // Takes the maxima of the other warpgroup, which are never lower. Returns as exponentiate().
    __device__ __forceinline__ bool take_maxima(float first, float second) {
        const float raised[2] = {first, second};
        bool any = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            any |= raised[r] != kept_maximum[r];
            factor[r] = raise_kept_maximum(kept_maximum[r], raised[r]);
        }
        if (!__any_sync(0xffffffffu, any)) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] *= factor[r];
        return true;
    }

    // Hides keys that a row does not see.
    __device__ __forceinline__ static void mask(Scores& s, const int2* seen, int first_row, int first_col) {
        mask_edge_by_ranges(seen, 0, first_col, [&](const auto& for_row) {
            for_accumulator_rows(s, [&](int, int r, const auto& for_scores) { for_row(first_row + 8 * r, for_scores); });
        });
    }
    // Hides keys of units whose page does not exist.
    __device__ __forceinline__ static void hide_absent(Scores& s, uint32_t absent) {
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            if (absent >> i / 8 & 1) s[i] = -INFINITY;
    }

private:
    // Raises kept maxima if a score exceeds one by more than kSlack.
    __device__ __forceinline__ bool raise_maxima(const Scores& s, float scale_log2) {
        float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int i = 0; i < kScores; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
        bool exceeds = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) exceeds |= fmaf(largest[r], scale_log2, -kept_maximum[r]) > kSlack;
        if (!__any_sync(0xffffffffu, exceeds)) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            factor[r] = raise_kept_maximum(kept_maximum[r], quad_max(largest[r]) * scale_log2);
            sum[r] *= factor[r];
        }
        return true;
    }
};

}  // namespace libflash::cuda::sm90
