// The tangents of the gradients by their definition. Each sum recomputes the probabilities that it needs. A name with the prefix
// t is a tangent; mu is the tangent of LSE; keep_ij is the dropout factor; slope_ij is the derivative of the tanh that bounds
// scores.
//
//     dp_ij = keep_ij dout_i . v_j     tdp_ij = keep_ij (tdout_i . v_j + dout_i . tv_j)
//     ds_ij = p_ij (dp_ij - delta_i)     tds_ij = p_ij (ts_ij - mu_i) (dp_ij - delta_i) + p_ij (tdp_ij - tdelta_i)
//     dz_ij = slope_ij ds_ij     tdz_ij = tslope_ij ds_ij + slope_ij tds_ij
//     tdq_i = scale sum_j (tdz_ij k_j + dz_ij tk_j)     tdk_j = scale sum_i (tdz_ij q_i + dz_ij tq_i)
//     tdv_j = sum_i keep_ij p_ij ((ts_ij - mu_i) dout_i + tdout_i)
//     tdbias_ij = tds_ij     tdsink = -sum_i p_sink ((tsink - mu_i) delta_i + tdelta_i)
#include <type_traits>

#include "cpu/cancel.h"
#include "cpu/scalar.h"
#include "cpu/scalar_tangent.h"

namespace libflash::cpu {
namespace {

template <class T>
struct GradientTangentHead : GradientHead<T> {
    const TangentProblem& whole;
    const InputTangents<T> tangents;
    const Rows<const T> tout, tdout;
    const LseRows tlse, tdlse, given_tdelta;

    struct Pair {
        double dz, tdz;  // without the scale
        double p, tp;    // after dropout
        double tds;
    };

    GradientTangentHead(const TangentProblem& p, int64_t b, int64_t h)
        : GradientHead<T>(p, b, h), whole(p), tangents(p, *this), tout(rows_of<const T>(p.tangents.out, p.q_rows, b, h)),
          tdout(rows_of<const T>(p.tangents.dout, p.q_rows, b, h)), tlse(p.tangents.lse, p.q_rows, b, h),
          tdlse(p.tangents.dlse, p.q_rows, b, h), given_tdelta(p.tangents.delta, p.q_rows, b, h) {}

    double tdelta(int64_t i) const {
        if (whole.tangents.delta.present) return given_tdelta.get(i);
        const int64_t n = this->problem.head_dim_v;
        return dot(this->dout[i], tout[i], n) + (tdout.data ? dot(tdout[i], this->out[i], n) : 0.0) - tdlse.get(i);
    }

    // All zero where key j is hidden from row i.
    Pair pair(int64_t i, int64_t j, double delta_i, double tdelta_i) const {
        if (!this->sees(i, j)) return {0, 0, 0, 0, 0};
        const int64_t n = this->problem.head_dim_v;
        const ScoreTangent score = tangents.score(*this, i, j);
        const double p = probability(this->score(i, j).value, this->lse.get(i)), keep = this->keep(i, j);
        const double below = score.score - tlse.get(i);
        const double dp = keep * dot(this->dout[i], this->v[j], n);
        double tdp = 0;
        if (tdout.data) tdp += dot(tdout[i], this->v[j], n);
        if (tangents.v.data) tdp += dot(this->dout[i], tangents.v[j], n);
        const double ds = p * (dp - delta_i), tds = p * below * (dp - delta_i) + p * (keep * tdp - tdelta_i);
        return {score.slope * ds, score.slope_tangent * ds + score.slope * tds, p * keep, p * keep * below, tds};
    }
};

template <class T>
void compute_tdq(const GradientTangentHead<T>& head) {
    const TangentProblem& problem = head.whole;
    const Rows<T> tdq = rows_of<T>(problem.tangents.dq, problem.q_rows, head.batch, head.head);
    for (int64_t i = 0; i < problem.q_rows.owned(head.batch); ++i) {
        cancellation_point();
        double sums[512] = {};
        const bool used = i < head.length_q && !head.row_empty(i);
        const double delta = used ? head.delta(i) : 0.0, tdelta = used ? head.tdelta(i) : 0.0;
        for (int64_t j = 0; used && j < head.length_k; ++j) {
            if (!head.sees(i, j)) continue;
            const auto pair = head.pair(i, j, delta, tdelta);
            for (int64_t c = 0; c < problem.head_dim; ++c) {
                sums[c] += pair.tdz * widen(head.k[j][c]);
                if (head.tangents.k.data) sums[c] += pair.dz * widen(head.tangents.k[j][c]);
            }
        }
        store_row(tdq[i], sums, problem.softmax_scale, problem.head_dim);
    }
}

// Adds the contribution of one query head to the tangents of dk and dv of key j.
template <class T>
void add_tdk_tdv(const GradientTangentHead<T>& head, int64_t j, double* tdk, double* tdv) {
    const TangentProblem& problem = head.whole;
    for (int64_t i = 0; i < head.length_q; ++i) {
        if (!head.sees(i, j)) continue;
        const auto pair = head.pair(i, j, head.delta(i), head.tdelta(i));
        for (int64_t c = 0; c < problem.head_dim; ++c) {
            tdk[c] += pair.tdz * widen(head.q[i][c]);
            if (head.tangents.q.data) tdk[c] += pair.dz * widen(head.tangents.q[i][c]);
        }
        for (int64_t c = 0; c < problem.head_dim_v; ++c) {
            tdv[c] += pair.tp * widen(head.dout[i][c]);
            if (head.tdout.data) tdv[c] += pair.p * widen(head.tdout[i][c]);
        }
    }
}

template <class T>
void compute_tdk_tdv(const TangentProblem& problem, int64_t batch, int64_t key_head) {
    const Rows<T> tdk = rows_of<T>(problem.tangents.dk, problem.k_rows, batch, key_head);
    const Rows<T> tdv = rows_of<T>(problem.tangents.dv, problem.k_rows, batch, key_head);
    const int64_t group = problem.group_size();
    for (int64_t j = 0; j < problem.k_rows.owned(batch); ++j) {
        cancellation_point();
        double tdk_sums[512] = {}, tdv_sums[512] = {};
        for (int64_t h = key_head * group; j < problem.k_rows.length(batch) && h < (key_head + 1) * group; ++h)
            add_tdk_tdv(GradientTangentHead<T>(problem, batch, h), j, tdk_sums, tdv_sums);
        store_row(tdk[j], tdk_sums, problem.softmax_scale, problem.head_dim);
        store_row(tdv[j], tdv_sums, 1.0, problem.head_dim_v);
    }
}

template <class T>
double tdbias_element(const TangentProblem& problem, const int64_t (&at)[4]) {
    const int64_t* shape = problem.tangents.dbias.shape;
    double sum = 0;
    const Range batches = sharing(at[0], shape[0], problem.batch), heads = sharing(at[1], shape[1], problem.heads_q);
    for (int64_t b = batches.begin; b < batches.end; ++b)
        for (int64_t h = heads.begin; h < heads.end; ++h) {
            const GradientTangentHead<T> head(problem, b, h);
            const Range rows = sharing(at[2], shape[2], head.length_q), keys = sharing(at[3], shape[3], head.length_k);
            for (int64_t i = rows.begin; i < rows.end; ++i) {
                cancellation_point();
                for (int64_t j = keys.begin; j < keys.end; ++j)
                    if (head.sees(i, j)) sum += head.pair(i, j, head.delta(i), head.tdelta(i)).tds;
            }
        }
    return sum;
}

template <class T>
void compute_tdbias(const TangentProblem& problem) {
    const ScoreTensor& to = problem.tangents.dbias;
    for (int64_t b = 0; b < to.shape[0]; ++b)
        for (int64_t h = 0; h < to.shape[1]; ++h)
            for (int64_t i = 0; i < to.shape[2]; ++i)
                for (int64_t j = 0; j < to.shape[3]; ++j)
                    store_as(to.dtype, to.data, element_at(to, b, h, i, j), tdbias_element<T>(problem, {b, h, i, j}));
}

template <class T>
void compute_tdsink(const TangentProblem& problem) {
    const HeadTensor& to = problem.tangents.dsink;
    for (int64_t h = 0; h < problem.heads_q; ++h) {
        double sum = 0;
        for (int64_t b = 0; b < problem.batch; ++b) {
            const GradientTangentHead<T> head(problem, b, h);
            const double sink = head_value(problem.sink, b, h);
            for (int64_t i = 0; sink != kMinusInfinity && i < head.length_q; ++i) {
                const double p = probability(sink, head.lse.get(i));
                if (p != 0) sum -= p * ((head.tangents.sink() - head.tlse.get(i)) * head.delta(i) + head.tdelta(i));
            }
        }
        store_as(to.dtype, to.data, h * to.head_stride, sum);
    }
}

}  // namespace

void scalar_backward_tangent(const TangentProblem& problem) {
    if (problem.with_gradients()) scalar_backward(problem);
    with_type(problem.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for (int64_t b = 0; b < problem.batch; ++b) {
            for (int64_t h = 0; h < problem.heads_q; ++h) compute_tdq(GradientTangentHead<T>(problem, b, h));
            for (int64_t h = 0; h < problem.heads_k; ++h) compute_tdk_tdv<T>(problem, b, h);
        }
        if (problem.tangents.dbias.present) compute_tdbias<T>(problem);
        if (problem.tangents.dsink.present) compute_tdsink<T>(problem);
    });
}

}  // namespace libflash::cpu
