// Statistics of the query rows that forward computes on request, in the registers of a warp beside the online softmax
// (online_softmax.cuh): the largest score, and for the entropy the sum of 2^x * x over the exponents x of the probabilities.
// A lane has those of its own scores until finish_statistics().
//
// The sums are relative to the kept maximum m. If it becomes m', every exponent changes by m - m', so that
// sum' = 2^(m - m') * (sum + (m - m') * row_sum).
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm80 {

struct NoRowStatistics {};

template <int kSlabs>
struct RowStatistics {
    float largest_score[kSlabs][2];  // in base-2 units; -infinity: none yet
    float weighted[kSlabs][2];       // sum of 2^x * x
    // Those of row_sum and weighted that long sums have taken (attention/long_sums.h): short sums lose fewer bits.
    float taken_sum[kSlabs][2], taken_weighted[kSlabs][2];

    template <class Do>
    __device__ static __forceinline__ void for_rows(const Do& for_row) {
#pragma unroll
        for (int i = 0; i < kSlabs * 2; ++i) for_row(i / 2, i % 2);
    }

    __device__ __forceinline__ void clear_statistics() {
        for_rows([&](int a, int r) {
            largest_score[a][r] = -INFINITY;
            weighted[a][r] = taken_sum[a][r] = taken_weighted[a][r] = 0.0f;
        });
    }

    // With an exponent of -infinity, p is 0 and adds nothing. NaN is in p.
    __device__ __forceinline__ void add_score(int a, int r, float score, float exponent, float p) {
        largest_score[a][r] = fmaxf(largest_score[a][r], score);
        weighted[a][r] = fmaf(p, fmaxf(exponent, -256.0f), weighted[a][r]);
    }

    // Before the row sum is rescaled. change: of the exponents. The first time it is huge, and the factor 0.
    __device__ __forceinline__ void rescale_weighted(int a, int r, float row_sum, float change, float factor) {
        const bool vanishes = factor == 0.0f;
        weighted[a][r] = vanishes ? 0.0f : factor * fmaf(change, row_sum, weighted[a][r]);
        taken_weighted[a][r] = vanishes ? 0.0f : factor * fmaf(change, taken_sum[a][r], taken_weighted[a][r]);
        taken_sum[a][r] *= factor;
    }

    // Before long sums take the row sum.
    __device__ __forceinline__ void take_weighted(int a, const float (&row_sum)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            taken_sum[a][r] += row_sum[r];
            taken_weighted[a][r] += weighted[a][r];
            weighted[a][r] = 0.0f;
        }
    }

    // Combines the lanes of each row.
    __device__ __forceinline__ void finish_statistics() {
        for_rows([&](int a, int r) {
            largest_score[a][r] = quad_max(largest_score[a][r]);
            weighted[a][r] = quad_sum(weighted[a][r] + taken_weighted[a][r]);
        });
    }
    // True if a complete sum overflowed though its row sum did not.
    __device__ __forceinline__ bool statistics_overflowed(const float (&row_sum)[kSlabs][2]) const {
        bool bad = false;
        for_rows([&](int a, int r) { bad |= !(fabsf(weighted[a][r]) < INFINITY) && row_sum[a][r] == row_sum[a][r]; });
        return bad;
    }
};

}  // namespace libflash::cuda::sm80
