// Statistics of the query rows that forward computes on request, in registers, during the online softmax (online_softmax.cuh):
// the largest score and, for the entropy, the sum of 2^x * x over the exponents x of the probabilities. Each lane has the
// statistics of its own scores until they are finished. Row r (0 or 1) of a slab has accumulator elements 2 * r and 2 * r + 1.
//
// The sums are relative to the kept maximum m. If it becomes m', every exponent changes by m - m', so that
// sum' = 2^(m - m') * (sum + (m - m') * row_sum).
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda {

// The exponent of a probability that is 0: 0 times an infinite exponent would be NaN.
constexpr float kLowestExponent = -256.0f;

// The entropy of a row in natural units: log2(total) minus the mean exponent. `row_sum` and `weighted` are relative to the kept
// maximum. sink: in base-2 units, -infinity without a sink; total: the sum of all probabilities including the sink, relative to
// the larger of the kept maximum and the sink. A probability of 0 adds nothing, although its exponent may be infinite.
__device__ __forceinline__ float row_entropy(float kept_maximum, float row_sum, float weighted, float sink, float total) {
    const float largest = fmaxf(kept_maximum, sink);
    const float of_keys = exp2_approx(kept_maximum - largest), of_sink = exp2_approx(sink - largest);
    float exponents = of_keys == 0.0f ? 0.0f : of_keys * fmaf(kept_maximum - largest, row_sum, weighted);
    if (of_sink != 0.0f) exponents += of_sink * (sink - largest);
    return total == 0.0f ? 0.0f : (__log2f(total) - exponents / total) * kLn2;
}

struct NoRowStatistics {};

// The sums for the entropy. kLongSums: long sums may take the row sums (attention/long_sums.h).
template <int kSlabs, bool kLongSums>
struct EntropySums {
    float weighted[kSlabs][2];  // sum of 2^x * x
    // The parts of row_sum and `weighted` that long sums have taken: short sums lose fewer bits.
    float taken_sum[kSlabs][2], taken_weighted[kSlabs][2];

    template <class Do>
    __device__ static __forceinline__ void for_rows(const Do& for_row) {
#pragma unroll
        for (int i = 0; i < kSlabs * 2; ++i) for_row(i / 2, i % 2);
    }

    __device__ __forceinline__ void clear_entropy() {
        for_rows([&](int a, int r) {
            weighted[a][r] = 0.0f;
            if constexpr (kLongSums) taken_sum[a][r] = taken_weighted[a][r] = 0.0f;
        });
    }

    // Called before the row sum is rescaled. change: the change of the exponents; at the first call it is huge, and the factor is
    // 0.
    __device__ __forceinline__ void rescale_weighted(int a, int r, float row_sum, float change, float factor) {
        const bool vanishes = factor == 0.0f;
        weighted[a][r] = vanishes ? 0.0f : factor * fmaf(change, row_sum, weighted[a][r]);
        if constexpr (!kLongSums) return;
        taken_weighted[a][r] = vanishes ? 0.0f : factor * fmaf(change, taken_sum[a][r], taken_weighted[a][r]);
        taken_sum[a][r] *= factor;
    }

    // Called before long sums take the row sum.
    __device__ __forceinline__ void take_weighted(int a, const float (&row_sum)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            taken_sum[a][r] += row_sum[r];
            taken_weighted[a][r] += weighted[a][r];
            weighted[a][r] = 0.0f;
        }
    }

    // Combines the lanes of a row.
    __device__ __forceinline__ void finish_row_entropy(int a, int r) {
        if constexpr (kLongSums) weighted[a][r] += taken_weighted[a][r];
        weighted[a][r] = quad_sum(weighted[a][r]);
    }
    // Whether the complete sum overflowed although the row sum is not NaN.
    __device__ __forceinline__ bool row_entropy_overflowed(int a, int r, float row_sum) const {
        return !(fabsf(weighted[a][r]) < INFINITY) && row_sum == row_sum;
    }
};

template <int kSlabs>
struct RowStatistics : EntropySums<kSlabs, true> {
    using Entropy = EntropySums<kSlabs, true>;
    using Entropy::for_rows;

    float largest_score[kSlabs][2];  // -infinity: none yet

    __device__ __forceinline__ void clear_statistics() {
        for_rows([&](int a, int r) { largest_score[a][r] = -INFINITY; });
        this->clear_entropy();
    }

    // With an exponent of -infinity, p is 0 and adds nothing. If the score is NaN, so is p.
    __device__ __forceinline__ void add_score(int a, int r, float score, float exponent, float p) {
        largest_score[a][r] = fmaxf(largest_score[a][r], score);
        this->weighted[a][r] = fmaf(p, fmaxf(exponent, kLowestExponent), this->weighted[a][r]);
    }

    // Combines the lanes of each row.
    __device__ __forceinline__ void finish_statistics() {
        for_rows([&](int a, int r) {
            largest_score[a][r] = quad_max(largest_score[a][r]);
            this->finish_row_entropy(a, r);
        });
    }
    __device__ __forceinline__ bool statistics_overflowed(const float (&row_sum)[kSlabs][2]) const {
        bool bad = false;
        for_rows([&](int a, int r) { bad |= this->row_entropy_overflowed(a, r, row_sum[a][r]); });
        return bad;
    }
};

}  // namespace libflash::cuda
