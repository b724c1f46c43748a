#include <type_traits>

#include "cpu/cancel.h"
#include "cpu/scalar.h"
#include "cpu/scalar_score.h"

namespace libflash::cpu {
namespace {

// The result of an earlier call for other keys of a row. With FLASH_FLAG_CONTINUE it counts as one more key, whose score is lse
// and whose value is out.
struct EarlierRow {
    double lse = kMinusInfinity;
    const double* out = nullptr;
};

template <class T>
SoftmaxRow softmax_row(const ScalarHead<T>& head, int64_t i, const EarlierRow& earlier, double* o) {
    const AttentionProblem& problem = head.problem;
    SoftmaxRow row;
    for (int64_t j = head.first_key(i); j < head.last_key(i); ++j)
        if (head.visible(i, j)) row.update_max(head.score(i, j).value);
    const double sink = problem.sink.present ? head_value(problem.sink, head.batch, head.head) : kMinusInfinity;
    row.update_max(sink);
    row.update_max(earlier.lse);
    if (row.empty()) return row;
    for (int64_t j = head.first_key(i); j < head.last_key(i); ++j) {
        if (!head.visible(i, j)) continue;
        const double weight = row.add(head.score(i, j).value) * head.keep(i, j);
        for (int64_t c = 0; c < problem.head_dim_v; ++c) o[c] += weight * widen(head.v[j][c]);
    }
    row.add(sink);
    const double weight = row.add(earlier.lse);
    for (int64_t c = 0; c < problem.head_dim_v && earlier.lse != kMinusInfinity; ++c) o[c] += weight * earlier.out[c];
    return row;
}

// The largest score of a row; -infinity without a visible key, NaN if the LSE is NaN.
template <class T>
double max_logit(const ScalarHead<T>& head, int64_t i, const SoftmaxRow& row) {
    double largest = kMinusInfinity;
    for (int64_t j = head.first_key(i); j < head.last_key(i); ++j)
        if (head.visible(i, j)) largest = std::fmax(largest, head.score(i, j).value);
    return std::isnan(row.lse()) ? row.lse() : largest;
}

// The entropy of a row, -sum p log(p), with the probability of the sink.
template <class T>
double entropy(const ScalarHead<T>& head, int64_t i, const SoftmaxRow& row) {
    if (row.empty()) return 0;
    double sum = 0;
    const auto add = [&](double score) {
        const double p = std::exp(score - row.lse());
        if (p != 0) sum -= p * (score - row.lse());
    };
    for (int64_t j = head.first_key(i); j < head.last_key(i); ++j)
        if (head.visible(i, j)) add(head.score(i, j).value);
    if (head.problem.sink.present) add(head_value(head.problem.sink, head.batch, head.head));
    return sum;
}

// The statistics of one head of one sequence. `of_head`: max_logit is one number per head; else `rows` is max_logit of each row.
template <class T>
struct ScalarStatistics {
    const ScalarHead<T>& head;
    const bool of_head;
    const LseRows rows, entropies;
    double largest = kMinusInfinity;

    explicit ScalarStatistics(const ScalarHead<T>& given)
        : head(given), of_head(given.problem.max_logit.ndim == 1),
          rows(of_head ? TensorView() : given.problem.max_logit, given.problem.q_rows, given.batch, given.head),
          entropies(given.problem.entropy, given.problem.q_rows, given.batch, given.head) {}

    void write(int64_t i, const SoftmaxRow& row) {
        const bool exists = i < head.length_q;
        if (head.problem.max_logit.present) {
            const double value = exists ? max_logit(head, i, row) : kMinusInfinity;
            if (value > largest || std::isnan(value)) largest = value;
            rows.set(i, value);
        }
        if (head.problem.entropy.present) entropies.set(i, exists ? entropy(head, i, row) : 0.0);
    }

    void finish() const {
        const TensorView& target = head.problem.max_logit;
        if (!target.present || !of_head) return;
        const int64_t at = head.head * target.stride[0];
        if (std::isnan(largest) || largest > load_as(target.dtype, target.data, at))
            store_as(target.dtype, target.data, at, largest);
    }
};

template <class T>
void forward_head(const AttentionProblem& problem, int64_t batch, int64_t query_head) {
    const ScalarHead<T> head(problem, batch, query_head);
    const AnyRows out(problem.out, problem.q_rows, batch, query_head);
    const LseRows lse(problem.lse, problem.q_rows, batch, query_head);
    ScalarStatistics<T> statistics(head);
    for (int64_t i = 0; i < problem.q_rows.owned(batch); ++i) {
        cancellation_point();
        double o[512] = {}, before[512];
        SoftmaxRow row;
        EarlierRow earlier;
        if (problem.continues) {
            earlier = {lse.get(i), before};
            for (int64_t c = 0; c < problem.head_dim_v; ++c) before[c] = out.get(i, c);
        }
        if (i < head.length_q) row = softmax_row(head, i, earlier, o);
        for (int64_t c = 0; c < problem.head_dim_v; ++c) out.set(i, c, row.empty() ? 0.0 : o[c] / row.row_sum);
        lse.set(i, row.lse());
        statistics.write(i, row);
    }
    statistics.finish();
}

}  // namespace

void scalar_forward(const AttentionProblem& problem) {
    const TensorView& largest = problem.max_logit;
    if (largest.present && largest.ndim == 1)
        for (int64_t h = 0; h < problem.heads_q; ++h)
            store_as(largest.dtype, largest.data, h * largest.stride[0], kMinusInfinity);
    with_type(problem.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for (int64_t b = 0; b < problem.batch; ++b)
            for (int64_t h = 0; h < problem.heads_q; ++h) forward_head<T>(problem, b, h);
    });
}

}  // namespace libflash::cpu
