// Row statistics of forward: the largest score of each row or head, and the entropy of each row's probabilities.
#pragma once

#include "cpu/engine/problem_rows.h"
#include "cpu/engine/softmax.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// Raises the largest score of a head to `value`, if that is larger. Tasks on several threads do this; the result does not depend
// on their order, because a NaN stays and no task passes -0.
template <class A>
FLASH_INLINE void raise_to(A* target, A value) {
    A old;
    __atomic_load(target, &old, __ATOMIC_RELAXED);
    while (!__builtin_isnan(old) && !(value <= old) &&
           !__atomic_compare_exchange(target, &old, &value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

template <class A>
FLASH_INLINE A* head_maximum(const AttentionProblem& problem, int64_t head) {
    return static_cast<A*>(problem.max_logit.data) + head * problem.max_logit.stride[0];
}

template <class A>
static void start_head_maxima(const AttentionProblem& problem) {
    if (!problem.max_logit.present || problem.max_logit.ndim != 1) return;
    for (int64_t head = 0; head < problem.heads_q; ++head) *head_maximum<A>(problem, head) = -kInfinity<A>;
}

// The entropy of a row from its row sum `sum`, its exponent sum (of exponents of e, not of 2), both relative to the score `top`,
// and its sink.
FLASH_INLINE double entropy_of(double top, double sum, double exponent_sum, double sink) {
    if (sum == 0 || sink == -kInfinity<double>) return sum == 0 ? 0.0 : __builtin_log(sum) - exponent_sum / sum;
    if (sink > top) {
        const double change = top - sink, factor = __builtin_exp(change);
        const double moved = factor == 0 ? 0.0 : factor * (exponent_sum + change * sum);
        const double total = factor * sum + 1;
        return __builtin_log(total) - moved / total;
    }
    const double weight = __builtin_exp(sink - top), total = sum + weight;
    return __builtin_log(total) - (weight == 0 ? exponent_sum : exponent_sum + weight * (sink - top)) / total;
}

// The statistics of one head of one sequence.
template <class A>
class Statistics {
public:
    Statistics(const AttentionProblem& problem, int64_t batch, int64_t head) {
        if (problem.max_logit.present) {
            if (problem.max_logit.ndim == 1)
                of_head_ = head_maximum<A>(problem, head);
            else
                max_logit_ = lse_rows_of<A>(problem.max_logit, problem.q_rows, batch, head);
        }
        if (problem.entropy.present) entropy_ = lse_rows_of<A>(problem.entropy, problem.q_rows, batch, head);
    }

    bool wanted() const { return of_head_ || max_logit_.data || entropy_.data; }

    // Writes the statistics of rows row0 to row0 + rows - 1. unit: the factor from the scores that softmax_tile() got to the real
    // scores.
    void write(const SoftmaxState<A>& softmax, int64_t row0, int64_t rows, double unit, double sink) const {
        A largest = -kInfinity<A>;
        for (int64_t i = 0; i < rows; ++i) {
            const A sum = softmax.row_sum[i];
            const double top = static_cast<double>(softmax.row_max[i]) * unit;
            const A value = __builtin_isnan(sum) ? sum : static_cast<A>(top) + A(0);  // NaN where lse is
            if (max_logit_.data) *max_logit_(row0 + i) = value;
            if (!(value <= largest) && !__builtin_isnan(largest)) largest = value;
            if (entropy_.data) {
                const double exponents = static_cast<double>(softmax.exponent_sum[i]) * 0.69314718055994530942;
                *entropy_(row0 + i) = static_cast<A>(entropy_of(top, static_cast<double>(sum), exponents, sink));
            }
        }
        if (of_head_) raise_to(of_head_, largest);
    }

    // A row past the used length.
    void clear(int64_t row) const {
        if (max_logit_.data) *max_logit_(row) = -kInfinity<A>;
        if (entropy_.data) *entropy_(row) = 0;
    }

private:
    StridedRows<A> max_logit_{}, entropy_{};
    A* of_head_ = nullptr;
};

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
