#include "cpu/append.h"

#include <type_traits>

#include "cpu/convert.h"
#include "cpu/threads.h"

namespace libflash::cpu {
namespace {

void turn(const DecodeProblem& problem, int64_t position, double* row) {
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

// Row i of the new keys and values of one sequence, one key head.
template <class T>
void append_row(const DecodeProblem& problem, int64_t b, int64_t i, int64_t h) {
    const int64_t j = problem.cached(b) + i;
    const auto at = [&](const TensorView& rows) {
        return static_cast<const T*>(rows.data) + b * rows.stride[0] + i * rows.stride[1] + h * rows.stride[2];
    };
    const auto to = [&](const TensorView& cache) {
        return static_cast<T*>(cache.data) + cache_row(problem.cache, cache, b, j) + h * cache.stride[2];
    };
    const T *k = at(problem.k_new), *v = at(problem.v_new);
    T *k_to = to(problem.cache.k), *v_to = to(problem.cache.v);
    if (problem.rotary_cos.present) {
        double row[512];
        turned_row(problem, k, j, row);
        const int64_t turned = 2 * problem.rotary_cos.shape[1];
        for (int64_t c = 0; c < turned; ++c) store(k_to[c], row[c]);
        for (int64_t c = turned; c < problem.head_dim; ++c) k_to[c] = k[c];
    } else {
        for (int64_t c = 0; c < problem.head_dim; ++c) k_to[c] = k[c];
    }
    for (int64_t c = 0; c < problem.head_dim_v; ++c) v_to[c] = v[c];
}

}  // namespace

void turned_row(const DecodeProblem& problem, const void* row, int64_t position, double* turned) {
    for (int64_t c = 0; c < problem.head_dim; ++c) turned[c] = load_as(problem.dtype, row, c);
    if (problem.rotary_cos.present) turn(problem, position, turned);
}

void append_new_keys(const DecodeProblem& problem, int threads) {
    if (!problem.k_new.present) return;
    with_type(problem.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(problem.batch * problem.heads_k, threads, [&](int64_t item, int) {
            const int64_t b = item / problem.heads_k, h = item % problem.heads_k;
            for (int64_t i = 0; i < problem.seqlen_new; ++i) append_row<T>(problem, b, i, h);
        });
    });
}

}  // namespace libflash::cpu
