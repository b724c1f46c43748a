// One query head of one sequence with the tangents of its inputs, for the scalar reference.
#pragma once

#include "cpu/scalar_gradient.h"
#include "problem/tangent.h"

namespace libflash::cpu {
namespace {

// Slope of the softcap, and tangents of the score and of that slope.
struct ScoreTangent {
    double slope, score, slope_tangent;
};

// The inputs of one head that have tangents. Rows of absent tensors are null.
template <class T>
struct InputTangents {
    const Tangents& given;
    const Rows<const T> q, k, v;
    const int64_t batch, head;

    InputTangents(const TangentProblem& p, const ScalarHead<T>& of)
        : given(p.tangents), q(rows_of<const T>(p.tangents.q, p.q_rows, of.batch, of.head)),
          k(rows_of<const T>(p.tangents.k, p.k_rows, of.batch, of.key_head)),
          v(rows_of<const T>(p.tangents.v, p.k_rows, of.batch, of.key_head)), batch(of.batch), head(of.head) {}

    double sink() const { return value_or_zero(given.sink, batch, head); }

    ScoreTangent score(const ScalarHead<T>& of, int64_t i, int64_t j) const {
        const AttentionProblem& problem = of.problem;
        const int64_t n = problem.head_dim;
        double tz = 0;
        if (q.data) tz += dot(q[i], of.k[j], n);
        if (k.data) tz += dot(of.q[i], k[j], n);
        tz *= problem.softmax_scale;
        ScoreTangent made = {1, tz, 0};
        if (problem.softcap > 0) {
            const double th = std::tanh(problem.softmax_scale * dot(of.q[i], of.k[j], n) / problem.softcap);
            made.slope = 1 - th * th;
            made.score = made.slope * tz;
            made.slope_tangent = -2 * th * made.slope * tz / problem.softcap;
        }
        if (given.bias.present)
            made.score += load_as(given.bias.dtype, given.bias.data, element_at(given.bias, batch, head, i, j));
        return made;
    }
};

}  // namespace
}  // namespace libflash::cpu
