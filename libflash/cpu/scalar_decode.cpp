#include <type_traits>

#include "cpu/append.h"
#include "cpu/cancel.h"
#include "cpu/scalar.h"
#include "cpu/scalar_score.h"
#include "problem/sequence_keys.h"

namespace libflash::cpu {
namespace {

// One query row and the cache of its sequence, new keys included.
template <class T>
struct DecodeRow {
    const DecodeProblem& problem;
    const int64_t batch, row, head, key_head;
    const SequenceKeys keys;
    const double alibi_slope;
    double q[kMostDecodeChannels];

    DecodeRow(const DecodeProblem& p, int64_t b, int64_t i, int64_t h)
        : problem(p), batch(b), row(i), head(h), key_head(h / p.group_size()), keys(p, b),
          alibi_slope(value_or_zero(p.alibi_slopes, b, h)) {
        read_query(p, b, i, h, q);
    }

    // Calls visit(key) for each key that the row sees.
    template <class Visit>
    void each_key(const Visit& visit) const {
        const SequenceKeys::Range range = keys.range(row);
        for (int64_t j = range.first; j < range.last; ++j)
            if (!keys.has_gaps() || keys.sees(row, j)) visit(j);
    }
    // The real values of a cached row.
    void read(const TensorView& tensor, const CacheScale& scale, int64_t j, double* row) const {
        const CachedRow at = cached_row(problem.cache, batch, j);
        const int64_t offset = offset_of(tensor, at, key_head), channels = tensor.shape[3], group = channels / scale.groups;
        const float* scales = scales_of(scale, batch, at, key_head);
        for (int64_t c = 0; c < channels; ++c)
            row[c] = load_as(tensor.dtype, tensor.data, offset + c) *
                     (scales ? static_cast<double>(scales[c / group * scale.group_stride]) : 1.0);
    }
    double score(int64_t j) const {
        double k[kMostDecodeChannels];
        read(problem.cache.k, problem.cache.k_scale, j, k);
        if (problem.cache.k_rope.present) read(problem.cache.k_rope, CacheScale(), j, k + problem.cache.k.shape[3]);
        const double product = dot(q, k, problem.head_dim);
        return score_of(problem, product, alibi_slope, keys.position(row) - keys.key_position(j)).value;
    }
};

template <class T>
void decode_row(const DecodeRow<T>& at, const AnyRows& out, const LseRows& lse) {
    cancellation_point();
    const DecodeProblem& problem = at.problem;
    double o[kMostDecodeChannels] = {};
    SoftmaxRow row;
    at.each_key([&](int64_t j) { row.update_max(at.score(j)); });
    const double sink = problem.sink.present ? head_value(problem.sink, at.batch, at.head) : kMinusInfinity;
    row.update_max(sink);
    if (!row.empty()) {
        at.each_key([&](int64_t j) {
            const double weight = row.add(at.score(j));
            double v[kMostDecodeChannels];
            at.read(problem.cache.v, problem.cache.v_scale, j, v);
            for (int64_t c = 0; c < problem.head_dim_v; ++c) o[c] += weight * v[c];
        });
        row.add(sink);
    }
    for (int64_t c = 0; c < problem.head_dim_v; ++c) out.set(at.row, c, row.empty() ? 0.0 : o[c] / row.row_sum);
    lse.set(at.row, row.lse());
}

}  // namespace

void scalar_decode(const DecodeProblem& problem) {
    append_new_keys(problem, 1);
    with_type(problem.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for (int64_t b = 0; b < problem.batch; ++b)
            for (int64_t h = 0; h < problem.heads_q; ++h) {
                const LseRows lse(problem.lse, problem.q_rows, b, h);
                const AnyRows out(problem.out, problem.q_rows, b, h);
                for (int64_t i = 0; i < problem.q_rows.length(b); ++i) decode_row(DecodeRow<T>(problem, b, i, h), out, lse);
            }
    });
}

}  // namespace libflash::cpu
