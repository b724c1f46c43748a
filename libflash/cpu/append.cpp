#include "cpu/append.h"

#include <type_traits>

#include "cpu/convert.h"
#include "cpu/parallel_for.h"
#include "cpu/quantize.h"

namespace libflash::cpu {
namespace {

void rotate(const DecodeProblem& problem, int64_t position, double* row) {
    const TensorView &cos = problem.rotary_cos, &sin = problem.rotary_sin;
    const int64_t pairs = cos.shape[1];
    for (int64_t n = 0; n < pairs; ++n) {
        const double c = load_as(cos.dtype, cos.data, position * cos.stride[0] + n);
        const double s = load_as(sin.dtype, sin.data, position * sin.stride[0] + n);
        double& first = row[problem.rotary_interleaved ? 2 * n : n];
        double& second = row[problem.rotary_interleaved ? 2 * n + 1 : pairs + n];
        const double x = first, y = second;
        first = x * c - y * s;
        second = x * s + y * c;
    }
}

// Rotates a row by the angles of `position` and rounds it to its type. from and to may be the same row.
template <class T>
void rotate_row(const DecodeProblem& problem, const T* from, int64_t channels, int64_t position, T* to) {
    double row[kMostDecodeChannels];
    const int64_t rotated = problem.rotary_cos.present ? 2 * problem.rotary_cos.shape[1] : 0;
    for (int64_t c = 0; c < rotated; ++c) row[c] = widen(from[c]);
    if (rotated) rotate(problem, position, row);
    for (int64_t c = 0; c < rotated; ++c) store(to[c], row[c]);
    for (int64_t c = rotated; c < channels; ++c) to[c] = from[c];
}

template <class T>
void rotate_query(const DecodeProblem& problem, int64_t b, int64_t i, int64_t h, T* to) {
    const RowStrides at = row_strides(problem.q);
    const int64_t position = problem.rotary_position(b, i), row = problem.q_rows.start(b) + i;
    const T* from = static_cast<const T*>(problem.q.data) + b * at.batch + row * at.row + h * at.head;
    rotate_row(problem, from, problem.head_dim, position, to);
}

// Appends row i of the new keys and values of one sequence and one key head.
template <class T, class C>
void append_row(const DecodeProblem& problem, int64_t b, int64_t i, int64_t h) {
    const int64_t j = problem.cached(b) + i;
    const auto from = [&](const TensorView& rows) {
        const RowStrides at = row_strides(rows);
        return static_cast<const T*>(rows.data) + b * at.batch + (problem.new_rows.start(b) + i) * at.row + h * at.head;
    };
    const KvCache& cache = problem.cache;
    const CachePlace at = place_of(cache, b, j);
    const auto write = [&](const T* row, const TensorView& tensor, const CacheScale& scale) {
        write_cached(row, tensor.shape[3], scale, scales_of(scale, b, at, h),
                     static_cast<C*>(tensor.data) + offset_of(tensor, at, h));
    };
    T k[kMostDecodeChannels];
    rotate_row(problem, from(problem.k_new), cache.k.shape[3], problem.new_key_position(b, i), k);
    write(k, cache.k, cache.k_scale);
    if (!cache.v_in_k) write(from(problem.v_new), cache.v, cache.v_scale);
    if (!cache.k_rope.present) return;
    const T* rope = from(problem.k_rope_new);
    T* rope_to = static_cast<T*>(cache.k_rope.data) + offset_of(cache.k_rope, at, h);
    for (int64_t c = 0; c < cache.rope_dim(); ++c) rope_to[c] = rope[c];
}

}  // namespace

void read_query(const DecodeProblem& problem, int64_t b, int64_t i, int64_t h, double* row) {
    with_type(problem.dtype, [&](auto* type) {
        std::remove_pointer_t<decltype(type)> rotated[kMostDecodeChannels];
        rotate_query(problem, b, i, h, rotated);
        for (int64_t c = 0; c < problem.head_dim; ++c) row[c] = widen(rotated[c]);
    });
}

void rotate_queries(const DecodeProblem& problem, void* rotated, int threads) {
    with_type(problem.dtype, [&](auto* type) {
        auto* rows = static_cast<decltype(type)>(rotated);
        parallel_for(problem.q_rows.total(), threads, [&](int64_t task, int) {
            const int64_t b = problem.q_rows.sequence_of(task), i = task - problem.q_rows.before(b);
            for (int64_t h = 0; h < problem.heads_q; ++h)
                rotate_query(problem, b, i, h, rows + (task * problem.heads_q + h) * problem.head_dim);
        });
    });
}

void append_new_keys(const DecodeProblem& problem, int threads) {
    if (!problem.k_new.present) return;
    with_type(problem.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(problem.batch * problem.heads_k, threads, [&](int64_t task, int) {
            const int64_t b = task / problem.heads_k, h = task % problem.heads_k;
            with_cache_type(problem.cache.dtype, [&](auto* stored) {
                using C = std::remove_pointer_t<decltype(stored)>;
                if constexpr (std::is_same_v<C, T> || (sizeof(C) == 1 && !std::is_same_v<T, double>))
                    for (int64_t i = 0; i < problem.new_rows.length(b); ++i) append_row<T, C>(problem, b, i, h);
            });
        });
    });
}

}  // namespace libflash::cpu
