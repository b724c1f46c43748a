// Runs a forward_tangent kernel of sm90 on the host, with three multiprocessors, and compares it with double precision: from
// saved LSE and, if the kernel has that instance, fused with forward; several work tiles per thread block, rows without keys,
// warpgroups without rows. The argument is 0, or the seed of a random order (forward_sm90.cpp). Prints the errors; exit code 0
// means none is too large.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda/sm90/forward_tangent.cuh"
#include "numbers.h"
#include "static_schedule_cases.h"
#include "tangent_sequences.h"

using namespace libflash;
using namespace libflash::cuda;

constexpr int kMultiprocessors = 3, kAll = kUnboundedWindow;
struct EmulatedKernel {
    static constexpr KernelConfig config{
        "forward_tangent", Operation::forward_tangent, "sm90", KernelType::DTYPE, HEAD_DIM, HEAD_DIM, TANGENT_TILE, STAGES, ""};
};
using T = ElementOf<EmulatedKernel::config.dtype>;
constexpr double kRounding = EmulatedKernel::config.dtype == KernelType::f16_ ? 0x1p-10 : 0x1p-7;

struct Case {
    int batch, heads_q, heads_k, queries, keys, head_dim, head_dim_v;
    int left, right;  // of the window
    float size, tangent_size;
    int given;  // tangents: 1: q, 2: k, 4: v
    bool sink, fused;
    Lengths lengths = Lengths::dense;  // other than dense: lengths differ, and rows outside a sequence are NaN
    bool delta = false;
    bool vectors = true;  // rows of out, dout and tdout can be read 16 bytes at a time
};

std::mt19937 generator(5);
template <class Number>
std::vector<Number> random(size_t count, float scale) {
    return random<Number>(count, scale, generator);
}

struct Problem {
    Case c;
    double scale;
    Side queries, keys;
    std::vector<T> q, k, v, tq, tk, tv, out, tout, dout, tdout;
    std::vector<float> sink, tsink, lse, tlse, dlse, tdlse, delta, tdelta;
    ForwardTangentParams params{};

    explicit Problem(const Case& given)
        : c(given), scale(1 / std::sqrt(double(c.head_dim))), queries(c, c.queries, 9), keys(c, c.keys, 41) {
        const size_t q_rows = size_t(queries.rows) * c.heads_q, k_rows = size_t(keys.rows) * c.heads_k;
        q = random<T>(q_rows * c.head_dim, c.size), k = random<T>(k_rows * c.head_dim, c.size);
        v = random<T>(k_rows * c.head_dim_v, 1);
        tq = random<T>(q.size(), c.tangent_size), tk = random<T>(k.size(), c.tangent_size);
        tv = random<T>(v.size(), c.tangent_size);
        dout = random<T>(q_rows * c.head_dim_v, 1), tdout = random<T>(q_rows * c.head_dim_v, 1);
        sink = random<float>(c.heads_q, 1), tsink = random<float>(c.heads_q, c.tangent_size), tdlse = random<float>(q_rows, 1);
        dlse = random<float>(q_rows, 1);
        out.assign(q_rows * c.head_dim_v, T(NAN)), tout = out;
        lse.assign(q_rows, NAN), tlse = delta = tdelta = lse;
        hide_rows();
        fill_in();
    }
    // Rows after the used length, and all rows of the second packed sequence, whose results are not checked, are NaN.
    template <class Visit>
    void for_hidden_rows(const Side& side, const Visit& visit) const {
        for (int b = 0; b < c.batch; ++b) {
            const int first = c.lengths == Lengths::packed && b == 1 ? 0 : side.length[b];
            for (int i = first; i < side.owned[b]; ++i) visit(side.start[b] + i);
        }
    }
    void hide_rows() {
        const auto fill = [](std::vector<T>& x, int row, int size) {
            std::fill_n(x.begin() + int64_t{row} * size, size, T(NAN));
        };
        for_hidden_rows(queries, [&](int row) {
            for (std::vector<T>* x : {&q, &tq}) fill(*x, row, c.heads_q * c.head_dim);
            for (std::vector<T>* x : {&dout, &tdout}) fill(*x, row, c.heads_q * c.head_dim_v);
        });
        for_hidden_rows(keys, [&](int row) {
            for (std::vector<T>* x : {&k, &tk}) fill(*x, row, c.heads_k * c.head_dim);
            for (std::vector<T>* x : {&v, &tv}) fill(*x, row, c.heads_k * c.head_dim_v);
        });
    }

    void fill_in() {
        const auto rows = [&](std::vector<T>& x, const Side& side, int heads, int dim) {
            const int64_t row = int64_t{heads} * dim;
            return RowsParams{x.data(), c.lengths == Lengths::packed ? 0 : side.owned[0] * row, row, dim};
        };
        const auto statistics = [&](std::vector<float>& x) {
            return RowStatisticsParams{x.data(), c.lengths == Lengths::packed ? 0 : queries.owned[0], 1, queries.rows};
        };
        params.q = rows(q, queries, c.heads_q, c.head_dim), params.k = rows(k, keys, c.heads_k, c.head_dim);
        params.v = rows(v, keys, c.heads_k, c.head_dim_v);
        if (c.given & 1) params.tq = rows(tq, queries, c.heads_q, c.head_dim);
        if (c.given & 2) params.tk = rows(tk, keys, c.heads_k, c.head_dim);
        if (c.given & 4) params.tv = rows(tv, keys, c.heads_k, c.head_dim_v);
        params.out = rows(out, queries, c.heads_q, c.head_dim_v), params.tout = rows(tout, queries, c.heads_q, c.head_dim_v);
        params.lse = statistics(lse), params.tlse = statistics(tlse);
        if (c.delta) {
            params.dout = rows(dout, queries, c.heads_q, c.head_dim_v),
            params.tdout = rows(tdout, queries, c.heads_q, c.head_dim_v);
            params.tdlse = statistics(tdlse), params.tdelta = statistics(tdelta);
            params.dlse = statistics(dlse), params.delta = statistics(delta);
        }
        params.q_lengths = queries.params(c), params.k_lengths = keys.params(c);
        params.batch = c.batch, params.heads_q = c.heads_q, params.group_size = c.heads_q / c.heads_k;
        params.head_dim = c.head_dim, params.head_dim_v = c.head_dim_v;
        params.softmax_scale = static_cast<float>(scale), params.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
        params.mask = {c.left, c.right, false};
        params.vector_loads = params.vector_out = true, params.vector_rows = c.vectors;
        params.rare.dropout.keep_factor = 1;
        if (c.sink) params.sink = {sink.data(), 0, 1, true}, params.tsink = {tsink.data(), 0, 1, true};
    }

    ForwardTangentPlan plan() {
        Sequences side;
        side.capacity = params.q_lengths.capacity, side.max_length = c.queries, side.cu = params.q_lengths.cu;
        const bool causal = c.right < kAll, paired = causal && c.lengths == Lengths::dense;
        const int tile = EmulatedKernel::config.tile_q;
        ForwardTangentPlan plan;
        plan.instance = c.fused ? kFusedTangentInstance : kPlainTangentInstance;
        const double head_bytes = paired ? kL2Bytes : 1e3;  // pairs: groups of one head
        params.schedule = schedule_params(side, c.batch, c.heads_q, tile * (paired ? 2 : 1), head_bytes, causal && !paired);
        params.schedule.paired = paired;
        const int64_t units = blocks_of(params.schedule);
        const int64_t most = c.lengths == Lengths::dense ? kMultiprocessors : units;
        plan.attention = launch_shape(make_static_schedule(params.schedule, side.capacity, tile, most),
                                      resources_of_forward_tangent<EmulatedKernel>(0, plan.instance.number));
        return plan;
    }

    struct Row {
        bool sees_keys;
        double lse, mu, delta, tdelta;
        std::vector<double> out, tout;
    };
    Row solve(int b, int h, int i) const {
        const int dim = c.head_dim, dim_v = c.head_dim_v, length_k = keys.length[b], shift = length_k - queries.length[b];
        const size_t at = size_t(queries.start[b] + i) * c.heads_q + h;
        const auto key = [&](int j) { return size_t(keys.start[b] + j) * c.heads_k + h / params.group_size; };
        Row row{i < queries.length[b], -INFINITY, 0, 0, 0, std::vector<double>(dim_v), std::vector<double>(dim_v)};
        std::vector<double> s(length_k, -INFINITY), ts(length_k, 0);
        double largest = c.sink ? double{sink[h]} : -INFINITY;
        for (int j = 0; row.sees_keys && j < length_k; ++j) {
            const int64_t ahead = int64_t{j} - i - shift;
            if (ahead > c.right || -ahead > c.left) continue;
            s[j] = scale * dot(&q[at * dim], &k[key(j) * dim], dim);
            if (c.given & 1) ts[j] += scale * dot(&tq[at * dim], &k[key(j) * dim], dim);
            if (c.given & 2) ts[j] += scale * dot(&q[at * dim], &tk[key(j) * dim], dim);
            largest = std::max(largest, s[j]);
        }
        if (largest == -INFINITY) row.sees_keys = false;
        if (!row.sees_keys) return row;
        double sum = c.sink ? std::exp(sink[h] - largest) : 0;
        for (int j = 0; j < length_k; ++j) sum += std::exp(s[j] - largest);
        row.lse = largest + std::log(sum);
        if (c.sink) row.mu = std::exp(sink[h] - row.lse) * tsink[h];
        for (int j = 0; j < length_k; ++j) row.mu += std::exp(s[j] - row.lse) * ts[j];
        for (int j = 0; j < length_k; ++j) {
            const double p = std::exp(s[j] - row.lse);
            if (p == 0) continue;
            add_scaled(row.out.data(), p, &v[key(j) * dim_v], dim_v);
            add_scaled(row.tout.data(), p * (ts[j] - row.mu), &v[key(j) * dim_v], dim_v);
            if (c.given & 4) add_scaled(row.tout.data(), p, &tv[key(j) * dim_v], dim_v);
        }
        const size_t number = size_t(h) * queries.rows + queries.start[b] + i;
        row.delta = -dlse[number], row.tdelta = -tdlse[number];
        for (int x = 0; x < dim_v; ++x) {
            const double y = wide(dout[at * dim_v + x]);
            row.delta += y * row.out[x], row.tdelta += wide(tdout[at * dim_v + x]) * row.out[x] + y * row.tout[x];
        }
        return row;
    }
    template <class Visit>
    void for_checked_rows(const Visit& visit) const {
        for (int b = 0; b < c.batch; ++b)
            for (int h = 0; h < c.heads_q && !(c.lengths == Lengths::packed && b == 1); ++h)
                for (int i = 0; i < queries.owned[b]; ++i) visit(solve(b, h, i), size_t(queries.start[b] + i), h);
    }
};

bool check(const Case& c) {
    Problem p(c);
    const auto number = [&](size_t row, int h) { return size_t(h) * p.queries.rows + row; };
    if (!c.fused) {
        p.for_checked_rows([&](const Problem::Row& exact, size_t row, int h) {
            p.lse[number(row, h)] = static_cast<float>(exact.lse);
            for (int x = 0; x < c.head_dim_v; ++x) p.out[(row * c.heads_q + h) * c.head_dim_v + x] = T(float(exact.out[x]));
        });
    }
    const ForwardTangentPlan plan = p.plan();
    launch_forward_tangent<EmulatedKernel>(plan, p.params, nullptr);
    RelativeError out, tout, lse, mu, delta, tdelta;
    bool zeros = true;
    p.for_checked_rows([&](const Problem::Row& exact, size_t row, int h) {
        const size_t first = (row * c.heads_q + h) * c.head_dim_v, at = number(row, h);
        for (int x = 0; x < c.head_dim_v; ++x) {
            zeros &= exact.sees_keys || (wide(p.tout[first + x]) == 0 && wide(p.out[first + x]) == 0);
            out.add(wide(p.out[first + x]), exact.out[x]), tout.add(wide(p.tout[first + x]), exact.tout[x]);
        }
        zeros &= exact.sees_keys ||
                 (p.lse[at] == -INFINITY && p.tlse[at] == 0 && (!c.delta || (p.delta[at] == 0 && p.tdelta[at] == 0)));
        if (!exact.sees_keys) return;
        lse.add(p.lse[at], exact.lse), mu.add(p.tlse[at], exact.mu);
        if (c.delta) delta.add(p.delta[at], exact.delta), tdelta.add(p.tdelta[at], exact.tdelta);
    });
    const double limit = kRounding * std::max(1.0f, c.size * c.size);
    const bool good = zeros && out.value() <= kRounding && tout.value() <= limit && lse.value() <= 1e-5 && mu.value() <= limit &&
                      delta.value() <= kRounding && tdelta.value() <= limit;
    std::printf("%s %d x %d heads %d/%d keys %d dim %d/%d window %d %d size %g/%g given %d sink %d fused %d lengths %d: ",
                good ? "ok" : "WRONG", c.batch, c.queries, c.heads_q, c.heads_k, c.keys, c.head_dim, c.head_dim_v, c.left,
                c.right, c.size, c.tangent_size, c.given, c.sink, c.fused, static_cast<int>(c.lengths));
    std::printf("out %.1e, tout %.1e, lse %.1e, tlse %.1e, delta %.1e, tdelta %.1e%s\n", out.value(), tout.value(), lse.value(),
                mu.value(), delta.value(), tdelta.value(), zeros ? "" : ", rows that do not count are not 0");
    return good;
}

int main(int, char** argv) {
    emulation::set_random_order(std::atoi(argv[1]));
    constexpr int kDim = HEAD_DIM, kFew = kDim > 128 ? 136 : kDim - 8;
    bool good = true;
    for (const bool fused : {false, true}) {
        if (fused && !is_fused_with_forward(EmulatedKernel::config)) continue;
        const Case cases[] = {
            {1, 1, 1, 64, 100, kDim, kDim, kAll, kAll, 1, 1, 7, false, fused},                              // one work tile
            {1, 2, 1, 300, 333, kDim, kDim, kAll, 0, 1, 1, 7, true, fused, Lengths::dense, true},           // causal
            {2, 2, 2, 200, 70, kDim, kDim - 8, kAll, 0, 1, 1, 7, false, fused, Lengths::dense, true},       // rows without keys
            {1, 1, 1, 520, 520, kDim - 8, kDim, 100, 0, 1, 1, 7, false, fused},                             // a window
            {1, 1, 1, 150, 400, kDim, kDim, kAll, kAll, 3, 2000, 3, false, fused},                          // large tangents
            {1, 1, 1, 130, 260, kDim, kDim, kAll, kAll, 1, 4e-3f, 1, false, fused},                         // small; of q alone
            {1, 1, 1, 130, 200, kDim, kDim, kAll, kAll, 1, 1, 2, false, fused},                             // of k alone
            {1, 1, 1, 130, 200, kDim, kDim, kAll, kAll, 1, 1, 4, true, fused},                              // of v alone
            {1, 2, 1, 150, 500, kDim, kDim, kAll, kAll, 12, 1, 7, false, fused},                            // large scores
            {1, 1, 1, 130, 0, kDim, kDim, kAll, kAll, 1, 1, 7, true, fused},                                // no keys but a sink
            {1, 1, 1, 90, 130, kDim, kDim - 8, 90, 0, 1, 1, 7, false, fused, Lengths::dense, true, false},  // no vectors
            {1, 2, 1, 150, 100, kFew, kFew, kAll, 0, 1, 1, 7, false, fused},                                // fewer channels
            {3, 2, 1, 210, 250, kDim, kDim, kAll, 0, 1, 1, 7, false, fused, Lengths::packed, true},
            {3, 1, 1, 150, 140, kDim, kDim, 60, 30, 1, 1, 7, true, fused, Lengths::used, true},
        };
        for (const Case& c : cases) good &= check(c);
    }
    return good ? 0 : 1;
}
