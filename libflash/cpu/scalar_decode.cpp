#include <type_traits>

#include "cpu/append.h"
#include "cpu/cancel.h"
#include "cpu/scalar.h"
#include "cpu/scalar_score.h"

namespace libflash::cpu {
namespace {

// One query row and the cache of its sequence, new keys included.
template <class T>
struct DecodeRow {
    const DecodeProblem& problem;
    const int64_t batch, row, head, key_head, length_k, shift;
    const double alibi_slope;
    double q[kMostDecodeChannels];

    DecodeRow(const DecodeProblem& p, int64_t b, int64_t i, int64_t h)
        : problem(p), batch(b), row(i), head(h), key_head(h / p.group_size()), length_k(p.cached(b) + p.seqlen_new),
          shift(p.mask_rule.shift(p.seqlen_q, length_k)), alibi_slope(value_or_zero(p.alibi_slopes, b, h)) {
        read_query(p, b, i, h, q);
    }

    int64_t first_key() const {
        const int64_t first = problem.mask_rule.first(row, shift), pad = problem.leftpad ? problem.leftpad[batch] : 0;
        return first > pad ? first : pad;
    }
    int64_t last_key() const {
        const int64_t last = problem.mask_rule.last(row, shift);
        return last < length_k ? last : length_k;
    }
    // The real values of a cached row.
    void read(const TensorView& tensor, const CacheScale& scale, int64_t j, double* row) const {
        const CachePlace at = place_of(problem.cache, batch, j);
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
        return score_of(problem, product, alibi_slope, row + length_k - problem.seqlen_q - j).value;
    }
};

template <class T>
void decode_row(const DecodeRow<T>& at, T* out, const LseRows& lse) {
    cancellation_point();
    const DecodeProblem& problem = at.problem;
    double o[kMostDecodeChannels] = {};
    SoftmaxRow row;
    for (int64_t j = at.first_key(); j < at.last_key(); ++j) row.update_max(at.score(j));
    const double sink = problem.sink.present ? head_value(problem.sink, at.batch, at.head) : kMinusInfinity;
    row.update_max(sink);
    if (!row.empty()) {
        for (int64_t j = at.first_key(); j < at.last_key(); ++j) {
            const double weight = row.add(at.score(j));
            double v[kMostDecodeChannels];
            at.read(problem.cache.v, problem.cache.v_scale, j, v);
            for (int64_t c = 0; c < problem.head_dim_v; ++c) o[c] += weight * v[c];
        }
        row.add(sink);
    }
    for (int64_t c = 0; c < problem.head_dim_v; ++c) store(out[c], row.empty() ? 0.0 : o[c] / row.row_sum);
    lse.set(at.row, row.lse());
}

}  // namespace

void scalar_decode(const DecodeProblem& problem) {
    append_new_keys(problem, 1);
    Sequences dense;
    dense.batch = problem.batch, dense.capacity = problem.seqlen_q;
    with_type(problem.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for (int64_t b = 0; b < problem.batch; ++b)
            for (int64_t h = 0; h < problem.heads_q; ++h) {
                const LseRows lse(problem.lse, dense, b, h);
                const Rows<T> out = rows_of<T>(problem.out, dense, b, h);
                for (int64_t i = 0; i < problem.seqlen_q; ++i) decode_row(DecodeRow<T>(problem, b, i, h), out[i], lse);
            }
    });
}

}  // namespace libflash::cpu
