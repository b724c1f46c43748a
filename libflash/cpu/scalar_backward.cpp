// The gradients by their definition. Each sum recomputes the probabilities that it needs. keep_ij is the factor of dropout, 0 for
// dropped entries; slope_ij is the derivative of the tanh that bounds scores.
//
//     p_ij = exp(s_ij - lse_i)     delta_i = dout_i . out_i - dlse_i
//     ds_ij = p_ij (keep_ij dout_i . v_j - delta_i)
//     dq_i = scale sum_j slope_ij ds_ij k_j     dk_j = scale sum_i slope_ij ds_ij q_i     dv_j = sum_i p_ij keep_ij dout_i
//     dbias_ij = ds_ij     dsink = -sum_i exp(sink - lse_i) delta_i
#include <type_traits>

#include "cpu/cancel.h"
#include "cpu/scalar.h"
#include "cpu/scalar_gradient.h"

namespace libflash::cpu {
namespace {

void store_row(const AnyRows& to, int64_t row, const double* sums, double factor, int64_t n, bool add) {
    for (int64_t c = 0; c < n; ++c) to.set(row, c, factor * sums[c] + (add ? to.get(row, c) : 0.0));
}

template <class T>
void compute_dq(const GradientHead<T>& head) {
    const AttentionProblem& problem = head.problem;
    const AnyRows dq(problem.dq, problem.q_rows, head.batch, head.head);
    for (int64_t i = 0; i < problem.q_rows.owned(head.batch); ++i) {
        cancellation_point();
        double sums[512] = {};
        const double delta = i < head.length_q ? head.delta(i) : 0.0;
        for (int64_t j = 0; i < head.length_q && j < head.length_k; ++j) {
            if (!head.sees(i, j)) continue;
            const auto pair = head.pair(i, j, delta);
            for (int64_t c = 0; c < problem.head_dim; ++c) sums[c] += pair.slope * pair.ds * widen(head.k[j][c]);
        }
        store_row(dq, i, sums, problem.softmax_scale, problem.head_dim, problem.adds);
    }
}

// Adds the contribution of one query head to dk and dv of key j.
template <class T>
void add_dk_dv(const GradientHead<T>& head, int64_t j, double* dk, double* dv) {
    const AttentionProblem& problem = head.problem;
    for (int64_t i = 0; i < head.length_q; ++i) {
        if (!head.sees(i, j)) continue;
        const auto pair = head.pair(i, j, head.delta(i));
        for (int64_t c = 0; c < problem.head_dim; ++c) dk[c] += pair.slope * pair.ds * widen(head.q[i][c]);
        for (int64_t c = 0; c < problem.head_dim_v; ++c) dv[c] += pair.p * widen(head.dout[i][c]);
    }
}

template <class T>
void compute_dk_dv(const AttentionProblem& problem, int64_t batch, int64_t key_head) {
    const AnyRows dk(problem.dk, problem.k_rows, batch, key_head), dv(problem.dv, problem.k_rows, batch, key_head);
    const int64_t group = problem.group_size();
    for (int64_t j = 0; j < problem.k_rows.owned(batch); ++j) {
        cancellation_point();
        double dk_sums[512] = {}, dv_sums[512] = {};
        for (int64_t h = key_head * group; j < problem.k_rows.length(batch) && h < (key_head + 1) * group; ++h)
            add_dk_dv(GradientHead<T>(problem, batch, h), j, dk_sums, dv_sums);
        store_row(dk, j, dk_sums, problem.softmax_scale, problem.head_dim, problem.adds);
        store_row(dv, j, dv_sums, 1.0, problem.head_dim_v, problem.adds);
    }
}

template <class T>
double dbias_element(const AttentionProblem& problem, const int64_t (&at)[4]) {
    const int64_t* shape = problem.dbias.shape;
    double sum = 0;
    const Range batches = sharing(at[0], shape[0], problem.batch), heads = sharing(at[1], shape[1], problem.heads_q);
    for (int64_t b = batches.begin; b < batches.end; ++b)
        for (int64_t h = heads.begin; h < heads.end; ++h) {
            const GradientHead<T> head(problem, b, h);
            const Range rows = sharing(at[2], shape[2], head.length_q), keys = sharing(at[3], shape[3], head.length_k);
            for (int64_t i = rows.begin; i < rows.end; ++i) {
                cancellation_point();
                for (int64_t j = keys.begin; j < keys.end; ++j) sum += head.pair(i, j, head.delta(i)).ds;
            }
        }
    return sum;
}

template <class T>
void compute_dbias(const AttentionProblem& problem) {
    const ScoreTensor& dbias = problem.dbias;
    for (int64_t b = 0; b < dbias.shape[0]; ++b)
        for (int64_t h = 0; h < dbias.shape[1]; ++h)
            for (int64_t i = 0; i < dbias.shape[2]; ++i)
                for (int64_t j = 0; j < dbias.shape[3]; ++j)
                    store_as(dbias.dtype, dbias.data, element_at(dbias, b, h, i, j), dbias_element<T>(problem, {b, h, i, j}));
}

template <class T>
void compute_dsink(const AttentionProblem& problem) {
    for (int64_t h = 0; h < problem.heads_q; ++h) {
        double sum = 0;
        for (int64_t b = 0; b < problem.batch; ++b) {
            const GradientHead<T> head(problem, b, h);
            const double sink = head_value(problem.sink, b, h);
            for (int64_t i = 0; sink != kMinusInfinity && i < head.length_q; ++i)
                sum -= probability(sink, head.lse.get(i)) * head.delta(i);
        }
        store_as(problem.dsink.dtype, problem.dsink.data, h * problem.dsink.head_stride, sum);
    }
}

// Rows without a visible key get delta 0.
template <class T>
void write_delta(const GradientHead<T>& head) {
    for (int64_t i = 0; i < head.problem.q_rows.owned(head.batch); ++i)
        head.given_delta.set(i, i < head.length_q && !head.row_empty(i) ? head.delta(i) : 0.0);
}

}  // namespace

void scalar_backward(const AttentionProblem& problem) {
    with_type(problem.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for (int64_t b = 0; b < problem.batch; ++b) {
            for (int64_t h = 0; h < problem.heads_q; ++h) {
                const GradientHead<T> head(problem, b, h);
                if (problem.delta.present && !problem.reads_delta) write_delta(head);
                compute_dq(head);
            }
            for (int64_t h = 0; h < problem.heads_k; ++h) compute_dk_dv<T>(problem, b, h);
        }
        if (problem.dbias.present) compute_dbias<T>(problem);
        if (problem.dsink.present) compute_dsink<T>(problem);
    });
}

}  // namespace libflash::cpu
