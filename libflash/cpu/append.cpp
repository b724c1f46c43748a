#include "cpu/append.h"

#include <type_traits>

#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "cpu/parallel_for.h"
#include "cpu/quantize.h"
#include "cpu/thread_count.h"

namespace libflash::cpu {
namespace {

// The rotary embedding of a call.
struct Rotary {
    const TensorView &cos, &sin;
    bool interleaved;
    int64_t begin;  // the first rotated channel: that of the rope part, if keys have one
    template <class Problem>
    explicit Rotary(const Problem& p)
        : cos(p.rotary_cos), sin(p.rotary_sin), interleaved(p.rotary_interleaved),
          begin(p.cache.k_rope.present ? p.cache.k.shape[3] : 0) {}

    int64_t channels() const { return cos.present ? 2 * cos.shape[1] : 0; }
    void rotate(int64_t position, double* row) const {
        const int64_t pairs = cos.shape[1];
        for (int64_t n = 0; n < pairs; ++n) {
            const double c = load_as(cos.dtype, cos.data, position * cos.stride[0] + n);
            const double s = load_as(sin.dtype, sin.data, position * sin.stride[0] + n);
            double& first = row[interleaved ? 2 * n : n];
            double& second = row[interleaved ? 2 * n + 1 : pairs + n];
            const double x = first, y = second;
            first = x * c - y * s;
            second = x * s + y * c;
        }
    }
};

// Copies a row of `channels` channels. The first channels, those of the rotary embedding, are rotated by the angles of `position`
// and rounded to T. `from` and `to` may be the same row.
template <class T>
void rotate_row(const Rotary& rotary, const T* from, int64_t channels, int64_t position, T* to) {
    double row[kMostDecodeChannels];
    const int64_t rotated = rotary.channels();
    for (int64_t c = 0; c < rotated; ++c) row[c] = widen(from[c]);
    if (rotated) rotary.rotate(position, row);
    for (int64_t c = 0; c < rotated; ++c) store(to[c], row[c]);
    for (int64_t c = rotated; c < channels; ++c) to[c] = from[c];
}

template <class T>
void rotate_query(const DecodeProblem& problem, int64_t b, int64_t i, int64_t h, T* to) {
    const RowStrides at = row_strides(problem.q);
    const int64_t position = problem.rotary_position(b, i), row = problem.q_rows.start(b) + i;
    const T* from = static_cast<const T*>(problem.q.data) + b * at.batch + row * at.row + h * at.head;
    const Rotary rotary(problem);
    for (int64_t c = 0; c < rotary.begin; ++c) to[c] = from[c];
    rotate_row(rotary, from + rotary.begin, problem.head_dim - rotary.begin, position, to + rotary.begin);
}

// One new row: its index in the tensors of new rows, its place in the cache, and its position for the rotary embedding.
struct NewRow {
    int64_t batch, row;
    CachedRow at;
    int64_t position;
};

// Writes the key and value of one head of a new row to the cache. Problem: DecodeProblem or CacheWriteProblem.
template <class T, class C, class Problem>
void write_row(const Problem& problem, const NewRow& row, int64_t h) {
    const auto from = [&](const TensorView& rows) {
        const RowStrides at = row_strides(rows);
        return static_cast<const T*>(rows.data) + row.batch * at.batch + row.row * at.row + h * at.head;
    };
    const KvCache& cache = problem.cache;
    const auto write = [&](const T* values, const TensorView& tensor, const CacheScale& scale) {
        write_cached(values, tensor.shape[3], scale, scales_of(scale, row.batch, row.at, h),
                     static_cast<C*>(tensor.data) + offset_of(tensor, row.at, h));
    };
    const Rotary rotary(problem);
    if (problem.v_new.present) write(from(problem.v_new), cache.v, cache.v_scale);
    if (cache.k_rope.present) {
        write(from(problem.k_new), cache.k, cache.k_scale);
        T* const to = static_cast<T*>(cache.k_rope.data) + offset_of(cache.k_rope, row.at, h);
        rotate_row(rotary, from(problem.k_rope_new), cache.rope_dim(), row.position, to);
        return;
    }
    T k[kMostDecodeChannels];
    rotate_row(rotary, from(problem.k_new), cache.k.shape[3], row.position, k);
    write(k, cache.k, cache.k_scale);
}

// Calls body with null pointers of T, the type of the new rows, and of C, the type of the cache.
template <class Body>
void with_row_types(DType rows, DType cache, const Body& body) {
    with_type(rows, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        with_cache_type(cache, [&](auto* stored) {
            using C = std::remove_pointer_t<decltype(stored)>;
            if constexpr (std::is_same_v<C, T> || (sizeof(C) == 1 && !std::is_same_v<T, double>)) body(type, stored);
        });
    });
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
    with_row_types(problem.dtype, problem.cache.dtype, [&](auto* type, auto* stored) {
        using T = std::remove_pointer_t<decltype(type)>;
        using C = std::remove_pointer_t<decltype(stored)>;
        parallel_for(problem.batch * problem.heads_k, threads, [&](int64_t task, int) {
            const int64_t b = task / problem.heads_k, h = task % problem.heads_k;
            for (int64_t i = 0; i < problem.new_rows.length(b); ++i) {
                const int64_t key = problem.cached(b) + i;
                if (!problem.shard.has(key)) continue;
                const CachedRow at = cached_row(problem.cache, b, problem.shard.row_of(key));
                write_row<T, C>(problem, {b, problem.new_rows.start(b) + i, at, problem.new_key_position(b, i)}, h);
            }
        });
    });
}

void write_cache(const CacheWriteProblem& problem) {
    constexpr double kElementsPerThread = 1 << 16;
    const double elements = static_cast<double>(problem.rows) * static_cast<double>(problem.heads_k * problem.cache.k.shape[3]);
    const int most = threads_or_default(problem.request.num_threads);
    const int threads = elements < most * kElementsPerThread ? 1 + static_cast<int>(elements / kElementsPerThread) : most;
    with_row_types(problem.dtype, problem.cache.dtype, [&](auto* type, auto* stored) {
        using T = std::remove_pointer_t<decltype(type)>;
        using C = std::remove_pointer_t<decltype(stored)>;
        parallel_for(problem.rows, threads, [&](int64_t row, int) {
            if (!problem.writes(row)) return;
            const int64_t slot = problem.slot(row), block = slot / problem.cache_block_rows();
            const CachedRow at{block, slot - block * problem.cache_block_rows()};
            const int64_t position = problem.positions ? problem.positions[row] : 0;
            for (int64_t h = 0; h < problem.heads_k; ++h) write_row<T, C>(problem, {0, row, at, position}, h);
        });
    });
}

}  // namespace libflash::cpu
