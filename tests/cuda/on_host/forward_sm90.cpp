// A forward kernel of sm90 on the host, against double precision, on a machine of three multiprocessors: several items for a thread block, rows without
// keys, groups without rows, and scores that a kept maximum cannot bear. The argument is 0, or the number of a disorder: warps fall behind, copies arrive
// late and in any order, products are done when they are waited for. Prints what is wrong; the exit code is 0 if nothing is.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda/attention/fill_schedule.h"
#include "cuda/sm90/forward.cuh"

using namespace libflash;
using namespace libflash::cuda;

struct Row {
    static constexpr KernelConfig config{"forward",    "forward", "sm90", RowType::DTYPE, HEAD_DIM, HEAD_DIM,
                                         FORWARD_TILE, STAGES,    ""};
};
using T = sm90::Forward<Row>::T;
constexpr bool kWide = Row::config.dtype == RowType::bf16_;  // its exponents are those of floats
constexpr double kRounding = Row::config.dtype == RowType::f16_ ? 0x1p-11 : 0x1p-8;

struct Case {
    int batch, heads_q, heads_k, queries, keys, head_dim;
    int left, right;  // of the window; kUnboundedWindow: none
    // Of q and k; 0: they are nothing but one score far above the others, which are 0; -1: that score is lower, but values are near the end of float.
    float size;
    bool sink;
};

std::mt19937 generator(3);
template <class Number>
std::vector<Number> random(size_t count, float scale) {
    std::normal_distribution<float> normal;
    std::vector<Number> x(count);
    for (Number& y : x) y = Number(scale * normal(generator));
    return x;
}

bool check(const Case& c) {
    const int dim = c.head_dim, group = c.heads_q / c.heads_k;
    const double scale = 1 / std::sqrt(double(dim));
    std::vector<T> q = random<T>(size_t(c.batch) * c.queries * c.heads_q * dim, c.size),
                   k = random<T>(size_t(c.batch) * c.keys * c.heads_k * dim, c.size), v = random<T>(k.size(), 1);
    std::vector<float> sink = random<float>(c.heads_q, 1), lse(size_t(c.batch) * c.heads_q * c.queries, NAN);
    std::vector<T> out(q.size(), T(NAN));

    if (c.size <= 0) {
        for (T& x : q) x = T(0.0f);
        for (T& x : k) x = T(0.0f);
        for (size_t i = 0; i < q.size(); i += dim) q[i] = T(8.0f);
        // Nearly the largest exponent of a float; or a probability below the limit of sums.
        k[5 * dim] = T(static_cast<float>((c.size == 0 ? 88 : 9) / (8 * scale)));
        if (c.size < 0 && kWide)
            for (T& x : v) x = T(1e35f * float(x));
    }

    ForwardParams params{};
    const auto rows = [&](std::vector<T>& x, int count, int heads) {
        return RowsParams{x.data(), int64_t{count} * heads * dim, int64_t{heads} * dim, dim};
    };
    params.q = rows(q, c.queries, c.heads_q), params.out = rows(out, c.queries, c.heads_q);
    params.k = rows(k, c.keys, c.heads_k), params.v = rows(v, c.keys, c.heads_k);
    params.lse = {lse.data(), int64_t{c.heads_q} * c.queries, 1, c.queries};
    params.q_lengths = {nullptr, nullptr, c.queries}, params.k_lengths = {nullptr, nullptr, c.keys};
    params.batch = c.batch, params.heads_q = c.heads_q, params.group_size = group, params.head_dim = params.head_dim_v = dim;
    params.softmax_scale = static_cast<float>(scale), params.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
    params.mask = {c.left, c.right, false};
    params.vector_out = dim % 8 == 0;
    if (c.sink) params.sink = {sink.data(), 0, 1, true};
    Sequences side;
    side.capacity = side.max_length = c.queries;
    const bool paired = c.right < kUnboundedWindow;
    params.schedule = schedule_params(side, c.batch, c.heads_q, Row::config.tile_q * (paired ? 2 : 1), 1e3, false);
    params.schedule.paired = paired;
    launch_forward<Row>(params, nullptr);

    double error = 0, size = 0, worst_lse = 0;
    for (int b = 0; b < c.batch; ++b)
        for (int h = 0; h < c.heads_q; ++h)
            for (int i = 0; i < c.queries; ++i) {
                const auto at = [&](int count, int heads, int row, int head) {
                    return ((size_t(b) * count + row) * heads + head) * dim;
                };
                std::vector<double> s(c.keys, -INFINITY), o(dim, 0);
                double largest = c.sink ? double{sink[h]} : -INFINITY, sum = 0;
                for (int j = 0; j < c.keys; ++j) {
                    const int64_t ahead = int64_t{j} - i - (c.keys - c.queries);
                    if (ahead > c.right || -ahead > c.left) continue;
                    s[j] = 0;
                    for (int x = 0; x < dim; ++x)
                        s[j] += double(float(q[at(c.queries, c.heads_q, i, h) + x])) *
                                float(k[at(c.keys, c.heads_k, j, h / group) + x]);
                    s[j] *= scale;
                    largest = std::max(largest, s[j]);
                }
                if (c.sink) sum = std::exp(sink[h] - largest);
                for (int j = 0; j < c.keys && largest > -INFINITY; ++j) {
                    const double p = std::exp(s[j] - largest);
                    sum += p;
                    for (int x = 0; p > 0 && x < dim; ++x) o[x] += p * float(v[at(c.keys, c.heads_k, j, h / group) + x]);
                }
                const float got = lse[(size_t(b) * c.heads_q + h) * c.queries + i];
                const double wanted = largest + std::log(sum);
                worst_lse = std::max(worst_lse, sum > 0            ? std::fabs(got - wanted) / (1 + std::fabs(wanted))
                                                : got == -INFINITY ? 0.0
                                                                   : 1e9);
                if (!(std::fabs(got) >= 0)) worst_lse = 1e9;
                for (int x = 0; x < dim; ++x) {
                    const double exact = sum > 0 ? o[x] / sum : 0,
                                 difference = float(out[at(c.queries, c.heads_q, i, h) + x]) - exact;
                    error += difference * difference;
                    size += exact * exact;
                }
            }
    const double relative = size > 0 ? std::sqrt(error / size) : std::sqrt(error);
    const bool good = relative <= kRounding && worst_lse < 1e-4;
    std::printf("%s %d x %d heads %d/%d keys %d dim %d window %d %d size %g: relative error %.2e, lse %.1e\n",
                good ? "ok" : "WRONG", c.batch, c.queries, c.heads_q, c.heads_k, c.keys, dim, c.left, c.right, c.size, relative,
                worst_lse);
    return good;
}

int main(int, char** argv) {
    emulation::machine.disorder = std::atoi(argv[1]) != 0;
    emulation::machine.dice.seed(std::atoi(argv[1]));
    constexpr int kAll = kUnboundedWindow, kDim = HEAD_DIM;
    const Case cases[] = {
        {1, 1, 1, 64, 100, kDim, kAll, kAll, 1, false},    // one item, tiles of which parts are missing
        {1, 2, 1, 300, 333, kDim, kAll, 0, 1, true},       // causal; groups without rows
        {2, 2, 2, 200, 70, kDim, kAll, 0, 1, false},       // rows and whole tiles without keys
        {1, 1, 1, 520, 520, kDim - 8, 100, 0, 1, false},   // a window, more items than multiprocessors
        {1, 2, 1, 150, 700, kDim, kAll, kAll, 12, false},  // scores that overflow with a kept maximum
        {1, 1, 1, 400, 400, kDim, kAll, 0, 12, true},      // the same, causal
        {1, 1, 1, 64, 300, kDim, kAll, kAll, 0, false},    // one score that nearly does
        {1, 1, 1, 3, 0, kDim, kAll, kAll, 1, true},        // no keys at all
        {2, 4, 2, 400, 60, kDim, kAll, kAll, 1, false},    // many items of one key tile
        {2, 4, 4, 260, 200, kDim, 40, 0, 12, false},       // the same with a window, and overflow
        {1, 1, 1, 64, 300, kDim, kAll, kAll, -1, false},   // values that overflow under a kept maximum
    };
    bool good = true;
    for (const Case& c : cases) good &= check(c);
    return good ? 0 : 1;
}
