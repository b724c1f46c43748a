// The tangent of forward by its definition. Each sum recomputes the probabilities that it needs. A name with the prefix t is a
// tangent; mu is the tangent of LSE; keep_ij is the dropout factor.
//
//     mu_i = sum_j p_ij ts_ij + p_sink tsink     tout_i = sum_j keep_ij p_ij ((ts_ij - mu_i) v_j + tv_j)
//     delta_i = dout_i . out_i - dlse_i     tdelta_i = tdout_i . out_i + dout_i . tout_i - tdlse_i
#include <type_traits>

#include "cpu/cancel.h"
#include "cpu/scalar.h"
#include "cpu/scalar_tangent.h"

namespace libflash::cpu {
namespace {

template <class T>
class ForwardTangentHead {
public:
    ForwardTangentHead(const TangentProblem& p, int64_t batch, int64_t query_head)
        : problem_(p), head_(p, batch, query_head), tangents_(p, head_), out_(rows_of<T>(p.out, p.q_rows, batch, query_head)),
          tout_(rows_of<T>(p.tangents.out, p.q_rows, batch, query_head)),
          dout_(rows_of<const T>(p.dout, p.q_rows, batch, query_head)),
          tdout_(rows_of<const T>(p.tangents.dout, p.q_rows, batch, query_head)), lse_(p.lse, p.q_rows, batch, query_head),
          tlse_(p.tangents.lse, p.q_rows, batch, query_head), tdlse_(p.tangents.dlse, p.q_rows, batch, query_head),
          dlse_(p.dlse, p.q_rows, batch, query_head), delta_(p.delta, p.q_rows, batch, query_head),
          tdelta_(p.tangents.delta, p.q_rows, batch, query_head),
          sink_(p.sink.present ? head_value(p.sink, batch, query_head) : kMinusInfinity) {}

    void run() const {
        for (int64_t i = 0; i < problem_.q_rows.owned(head_.batch); ++i) {
            cancellation_point();
            double o[512] = {}, to[512] = {};
            const double lse = i < head_.length_q ? lse_of(i) : kMinusInfinity;
            const double mu = lse == kMinusInfinity ? 0.0 : mean_tangent(i, lse);
            if (lse != kMinusInfinity) add_values(i, lse, mu, o, to);
            write(i, lse, mu, o, to);
        }
    }

private:
    double lse_of(int64_t i) const {
        if (problem_.from_lse) return lse_.get(i);
        SoftmaxRow row;
        for_visible(i, [&](int64_t j) { row.update_max(head_.score(i, j).value); });
        row.update_max(sink_);
        if (row.empty()) return kMinusInfinity;
        for_visible(i, [&](int64_t j) { row.add(head_.score(i, j).value); });
        row.add(sink_);
        return row.lse();
    }

    double mean_tangent(int64_t i, double lse) const {
        const double p_sink = sink_ == kMinusInfinity ? 0.0 : probability(sink_, lse);
        double mu = p_sink > 0 ? p_sink * tangents_.sink() : 0.0;
        for_visible(i, [&](int64_t j) { mu += probability(head_.score(i, j).value, lse) * tangents_.score(head_, i, j).score; });
        return mu;
    }

    void add_values(int64_t i, double lse, double mu, double* o, double* to) const {
        for_visible(i, [&](int64_t j) {
            const double p = probability(head_.score(i, j).value, lse) * head_.keep(i, j);
            const double tp = p * (tangents_.score(head_, i, j).score - mu);
            for (int64_t c = 0; c < problem_.head_dim_v; ++c) {
                const double v = widen(head_.v[j][c]);
                o[c] += p * v;
                to[c] += tp * v + (tangents_.v.data ? p * widen(tangents_.v[j][c]) : 0.0);
            }
        });
    }

    void write(int64_t i, double lse, double mu, const double* o, const double* to) const {
        const int64_t n = problem_.head_dim_v;
        if (!problem_.from_lse) {
            store_row(out_[i], o, 1.0, n);
            lse_.set(i, lse);
        }
        if (tout_.data) store_row(tout_[i], to, 1.0, n);
        tlse_.set(i, mu);
        if (!problem_.tangents.delta.present) return;
        double delta = 0, tdelta = 0;
        if (lse != kMinusInfinity) {
            delta = -dlse_.get(i), tdelta = -tdlse_.get(i);
            for (int64_t c = 0; c < n; ++c) {
                const double dout = widen(dout_[i][c]);
                delta += dout * o[c], tdelta += dout * to[c];
                if (tdout_.data) tdelta += widen(tdout_[i][c]) * o[c];
            }
        }
        delta_.set(i, delta);
        tdelta_.set(i, tdelta);
    }

    template <class Body>
    void for_visible(int64_t i, const Body& body) const {
        for (int64_t j = head_.first_key(i); j < head_.last_key(i); ++j)
            if (head_.visible(i, j)) body(j);
    }

    const TangentProblem& problem_;
    const ScalarHead<T> head_;
    const InputTangents<T> tangents_;
    const Rows<T> out_, tout_;
    const Rows<const T> dout_, tdout_;
    const LseRows lse_, tlse_, tdlse_, dlse_, delta_, tdelta_;
    const double sink_;
};

}  // namespace

void scalar_forward_tangent(const TangentProblem& problem) {
    with_type(problem.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for (int64_t b = 0; b < problem.batch; ++b)
            for (int64_t h = 0; h < problem.heads_q; ++h) ForwardTangentHead<T>(problem, b, h).run();
    });
}

}  // namespace libflash::cpu
