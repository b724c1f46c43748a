// One query head of one sequence for the backward pass of the scalar reference.
#pragma once

#include "cpu/scalar_score.h"

namespace libflash::cpu {
namespace {

// exp(score - lse) of a row with a visible key. The exact difference is at most 0; because lse is rounded, it may be above 0.
inline double probability(double score, double lse) {
    const double difference = score - lse;
    return std::exp(difference > 0 ? 0.0 : difference);
}

template <class T>
struct GradientHead : ScalarHead<T> {
    const Rows<const T> out, dout;
    const LseRows lse, dlse, given_delta;

    struct Pair {
        double p;      // after dropout
        double ds;     // gradient of the score after the softcap
        double slope;  // derivative of the softcap
    };

    GradientHead(const AttentionProblem& p, int64_t b, int64_t h)
        : ScalarHead<T>(p, b, h), out(rows_of<const T>(p.out, p.q_rows, b, h)), dout(rows_of<const T>(p.dout, p.q_rows, b, h)),
          lse(p.lse, p.q_rows, b, h), dlse(p.dlse, p.q_rows, b, h), given_delta(p.delta, p.q_rows, b, h) {}

    double delta(int64_t i) const {
        if (this->problem.reads_delta && this->problem.delta.present) return given_delta.get(i);
        return dot(dout[i], out[i], this->problem.head_dim_v) - dlse.get(i);
    }
    bool row_empty(int64_t i) const { return lse.get(i) == kMinusInfinity; }

    // All zero where key j is hidden from row i.
    Pair pair(int64_t i, int64_t j, double delta_i) const {
        if (!sees(i, j)) return {0, 0, 0};
        const Score s = this->score(i, j);
        const double p = probability(s.value, lse.get(i)), keep = this->keep(i, j);
        const double dp = keep * dot(dout[i], this->v[j], this->problem.head_dim_v);
        return {p * keep, p * (dp - delta_i), s.slope};
    }
    bool sees(int64_t i, int64_t j) const { return this->in_band(i, j) && this->visible(i, j) && !row_empty(i); }
};

template <class T>
void store_row(T* to, const double* sums, double factor, int64_t n) {
    for (int64_t c = 0; c < n; ++c) store(to[c], factor * sums[c]);
}

struct Range {
    int64_t begin, end;
};

// The indices in [0, extent) along one dimension of the scores that belong to element `index` of a tensor with `size` elements in
// that dimension: all indices if the tensor is broadcast along it (size 1).
inline Range sharing(int64_t index, int64_t size, int64_t extent) {
    if (size == 1) return {0, extent};
    return {index, index < extent ? index + 1 : index};
}

}  // namespace
}  // namespace libflash::cpu
