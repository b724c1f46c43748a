// Runs the backward_tangent kernels of sm90 on the host, with three multiprocessors, and compares them with double precision:
// with and without a tangent of dout, several query heads of a key head, rows without keys, keys without rows, packed sequences.
// The argument is 0, or the seed of a random order (forward_sm90.cpp). Prints the errors; exit code 0 means none is too large.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda/host/tile_schedule.h"
#include "cuda/sm90/backward_tangent.cuh"
#include "numbers.h"
#include "tangent_sequences.h"

using namespace libflash;
using namespace libflash::cuda;

constexpr int kMultiprocessors = 3, kAll = kUnboundedWindow;
struct EmulatedKernel {
    static constexpr KernelConfig config{
        "backward_tangent", Operation::backward_tangent, "sm90", KernelType::DTYPE, HEAD_DIM, HEAD_DIM, TANGENT_TILE, STAGES, ""};
};
using T = ElementOf<EmulatedKernel::config.dtype>;
constexpr double kRounding = EmulatedKernel::config.dtype == KernelType::f16_ ? 0x1p-10 : 0x1p-7;

struct Case {
    int batch, heads_q, heads_k, queries, keys, head_dim, head_dim_v;
    int left, right;  // of the window
    float size, tangent_size;
    int given;  // tangents: 1: q, 2: k, 4: v, 8: dout
    bool sink;
    Lengths lengths = Lengths::dense;  // other than dense: lengths differ, and rows outside a sequence are NaN
    bool delta = false;                // delta and tdelta are given; out, tout, dlse and tdlse are not
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
    std::vector<T> q, k, v, dout, tq, tk, tv, tdout, out, tout, tdq, tdk, tdv;
    std::vector<float> sink, tsink, lse, tlse, dlse, tdlse, delta, tdelta, tdsink;
    std::vector<double> tdq64, tdk64, tdv64, tdsink64;
    std::vector<TangentStatistics> statistics;
    std::vector<int32_t> next_tiles{INT32_MIN, INT32_MIN}, first_units;
    BackwardTangentParams params{};

    explicit Problem(const Case& given)
        : c(given), scale(1 / std::sqrt(double(c.head_dim))), queries(c, c.queries, 9), keys(c, c.keys, 41) {
        const size_t q_rows = size_t(queries.rows) * c.heads_q, k_rows = size_t(keys.rows) * c.heads_k;
        const auto tangent = [&](size_t count, int bit) { return random<T>(count, c.given & bit ? c.tangent_size : 0); };
        q = random<T>(q_rows * c.head_dim, c.size), k = random<T>(k_rows * c.head_dim, c.size);
        v = random<T>(k_rows * c.head_dim_v, 1), dout = random<T>(q_rows * c.head_dim_v, 1);
        tq = tangent(q.size(), 1), tk = tangent(k.size(), 2), tv = tangent(v.size(), 4), tdout = tangent(dout.size(), 8);
        sink = random<float>(c.heads_q, 1), tsink = random<float>(c.heads_q, c.tangent_size);
        dlse = random<float>(q_rows, 1), tdlse = random<float>(q_rows, c.tangent_size);
        out.assign(dout.size(), T(0.0f)), tout = out;
        lse.assign(q_rows, -INFINITY), tlse.assign(q_rows, 0), delta = tdelta = tlse;
        tdq.assign(q.size(), T(NAN)), tdk.assign(k.size(), T(NAN)), tdv.assign(v.size(), T(NAN)), tdsink.assign(c.heads_q, NAN);
        tdq64.assign(q.size(), 0), tdk64.assign(k.size(), 0), tdv64.assign(v.size(), 0), tdsink64.assign(c.heads_q, 0);
        for (int b = 0; b < c.batch; ++b)
            for (int h = 0; h < c.heads_q && is_checked(b); ++h)
                for (int i = 0; i < queries.length[b]; ++i) solve(b, h, i);
        hide_rows();
        fill_in();
    }
    // All rows of the second packed sequence are NaN, and so are its results.
    bool is_checked(int b) const { return c.lengths != Lengths::packed || b != 1; }
    template <class Visit>
    void for_hidden_rows(const Side& side, const Visit& visit) const {
        for (int b = 0; b < c.batch; ++b)
            for (int i = is_checked(b) ? side.length[b] : 0; i < side.owned[b]; ++i) visit(side.start[b] + i);
    }
    void hide_rows() {
        const auto fill = [](std::vector<T>& x, int row, int size) {
            std::fill_n(x.begin() + int64_t{row} * size, size, T(NAN));
        };
        for_hidden_rows(queries, [&](int row) {
            for (std::vector<T>* x : {&q, &tq}) fill(*x, row, c.heads_q * c.head_dim);
            for (std::vector<T>* x : {&dout, &tdout, &out, &tout}) fill(*x, row, c.heads_q * c.head_dim_v);
            for (int h = 0; h < c.heads_q; ++h)
                for (std::vector<float>* x : {&lse, &tlse, &dlse, &tdlse, &delta, &tdelta}) (*x)[number(row, h)] = NAN;
        });
        for_hidden_rows(keys, [&](int row) {
            for (std::vector<T>* x : {&k, &tk}) fill(*x, row, c.heads_k * c.head_dim);
            for (std::vector<T>* x : {&v, &tv}) fill(*x, row, c.heads_k * c.head_dim_v);
        });
    }
    size_t number(int row, int h) const { return size_t(h) * queries.rows + row; }

    void fill_in() {
        const auto rows = [&](std::vector<T>& x, const Side& side, int heads, int dim) {
            const int64_t row = int64_t{heads} * dim;
            return RowsParams{x.data(), c.lengths == Lengths::packed ? 0 : side.owned[0] * row, row, dim};
        };
        const auto numbers = [&](std::vector<float>& x) {
            return RowStatisticsParams{x.data(), c.lengths == Lengths::packed ? 0 : queries.owned[0], 1, queries.rows};
        };
        const auto of_q = [&](std::vector<T>& x) { return rows(x, queries, c.heads_q, c.head_dim); };
        const auto of_out = [&](std::vector<T>& x) { return rows(x, queries, c.heads_q, c.head_dim_v); };
        const auto of_k = [&](std::vector<T>& x) { return rows(x, keys, c.heads_k, c.head_dim); };
        const auto of_v = [&](std::vector<T>& x) { return rows(x, keys, c.heads_k, c.head_dim_v); };
        params.q = of_q(q), params.k = of_k(k), params.v = of_v(v), params.dout = of_out(dout);
        if (c.given & 1) params.tq = of_q(tq);
        if (c.given & 2) params.tk = of_k(tk);
        if (c.given & 4) params.tv = of_v(tv);
        if (c.given & 8) params.tdout = of_out(tdout);
        params.tdq = of_q(tdq), params.tdk = of_k(tdk), params.tdv = of_v(tdv);
        params.lse = numbers(lse), params.tlse = numbers(tlse);
        if (c.delta) {
            params.delta = numbers(delta), params.tdelta = numbers(tdelta);
        } else {
            params.out = of_out(out), params.tout = of_out(tout);
            params.dlse = numbers(dlse), params.tdlse = numbers(tdlse);
        }
        params.q_lengths = queries.params(c), params.k_lengths = keys.params(c);
        params.batch = c.batch, params.heads_q = c.heads_q, params.heads_k = c.heads_k;
        params.group_size = c.heads_q / c.heads_k, params.head_dim = c.head_dim, params.head_dim_v = c.head_dim_v;
        params.softmax_scale = static_cast<float>(scale), params.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
        params.mask = {c.left, c.right, false};
        params.vector_loads = params.vector_out = true, params.vector_rows = !c.sink;
        params.rare.dropout.keep_factor = 1;
        params.part.end_row = INT32_MAX;
        if (!c.sink) return;
        params.sink = {sink.data(), 0, 1, true}, params.tsink = {tsink.data(), 0, 1, true};
        params.tdsink = {tdsink.data(), 1, true};
    }

    BackwardTangentPlan plan() {
        const Sequences q_side = queries.sequences(c, c.queries), k_side = keys.sequences(c, c.keys);
        const bool packed = c.lengths == Lengths::packed;
        params.units = packed ? queries.rows / kUnitRows + c.batch : (c.queries + kUnitRows - 1) / kUnitRows;
        statistics.assign(size_t(params.units) * kUnitRows * c.heads_q * (packed ? 1 : c.batch), {NAN, NAN, NAN, NAN});
        params.statistics = statistics.data();
        first_units.assign(c.batch, -1);
        params.first_units = first_units.data();
        const int tile = EmulatedKernel::config.tile_q;
        params.unit_schedule = schedule_params(q_side, c.batch, c.heads_q, kUnitRows, 1e3, false);
        params.query_schedule = schedule_params(q_side, c.batch, c.heads_q, tile, 1e3, c.right < kAll);
        params.key_schedule = schedule_params(k_side, c.batch, c.heads_k, tile, 1e3, false);
        BackwardTangentPlan plan;
        plan.instance = c.given & 8 ? kMovingDoutInstance : kConstantDoutInstance;
        const auto launch = [&](BackwardTangentStep step, int64_t blocks) {
            return launch_shape(blocks,
                                resources_of_backward_tangent<EmulatedKernel>(static_cast<int>(step), plan.instance.number));
        };
        plan.statistics = launch(BackwardTangentStep::statistics, blocks_of(params.unit_schedule));
        plan.tdq = launch(BackwardTangentStep::gradients, blocks_of(params.query_schedule));
        plan.tdk_tdv = launch(BackwardTangentStep::gradients_of_keys, blocks_of(params.key_schedule));
        if (plan.statistics.blocks > 0 && !has_kernel_for_each_gradient(EmulatedKernel::config)) {
            params.next_tiles = next_tiles.data();
            for (LaunchShape* shape : {&plan.tdq, &plan.tdk_tdv})
                shape->blocks = std::min<int64_t>(shape->blocks, kMultiprocessors);
        }
        if (c.sink) plan.dsink = launch(BackwardTangentStep::dsink, c.heads_q);
        return plan;
    }

    // Adds what row i of a sequence contributes to all results.
    void solve(int b, int h, int i) {
        const int dim = c.head_dim, dim_v = c.head_dim_v, length_k = keys.length[b], shift = length_k - queries.length[b];
        const int row = queries.start[b] + i;
        const size_t at = size_t(row) * c.heads_q + h, of_row = number(row, h);
        const auto key = [&](int j) { return size_t(keys.start[b] + j) * c.heads_k + h / (c.heads_q / c.heads_k); };
        const auto sees = [&](int j) { return int64_t{j} - i - shift <= c.right && int64_t{i} + shift - j <= c.left; };
        std::vector<double> s(length_k), ts(length_k), p(length_k), o(dim_v), to(dim_v);
        double largest = c.sink ? double{sink[h]} : -INFINITY;
        for (int j = 0; j < length_k; ++j) {
            if (!sees(j)) continue;
            s[j] = scale * dot(&q[at * dim], &k[key(j) * dim], dim);
            ts[j] = scale * (dot(&tq[at * dim], &k[key(j) * dim], dim) + dot(&q[at * dim], &tk[key(j) * dim], dim));
            largest = std::max(largest, s[j]);
        }
        if (largest == -INFINITY) return;
        double sum = c.sink ? std::exp(sink[h] - largest) : 0;
        for (int j = 0; j < length_k; ++j) sum += sees(j) ? std::exp(s[j] - largest) : 0;
        const double exact_lse = largest + std::log(sum);
        double mu = c.sink ? std::exp(sink[h] - exact_lse) * tsink[h] : 0;
        for (int j = 0; j < length_k; ++j) p[j] = sees(j) ? std::exp(s[j] - exact_lse) : 0, mu += p[j] * ts[j];
        lse[of_row] = static_cast<float>(exact_lse), tlse[of_row] = static_cast<float>(mu);
        for (int j = 0; j < length_k; ++j) {
            if (p[j] == 0) continue;
            add_scaled(o.data(), p[j], &v[key(j) * dim_v], dim_v);
            add_scaled(to.data(), p[j] * (ts[j] - mu), &v[key(j) * dim_v], dim_v);
            add_scaled(to.data(), p[j], &tv[key(j) * dim_v], dim_v);
        }
        double delta_exact = -dlse[of_row], tdelta_exact = -tdlse[of_row];
        for (int x = 0; x < dim_v; ++x) {
            T &rounded_o = out[at * dim_v + x], &rounded_to = tout[at * dim_v + x];
            rounded_o = T(static_cast<float>(o[x])), rounded_to = T(static_cast<float>(to[x]));
            const double y = wide(dout[at * dim_v + x]), ty = wide(tdout[at * dim_v + x]);
            const double read_o = c.delta ? o[x] : wide(rounded_o), read_to = c.delta ? to[x] : wide(rounded_to);
            delta_exact += y * read_o, tdelta_exact += ty * read_o + y * read_to;
        }
        delta[of_row] = static_cast<float>(delta_exact), tdelta[of_row] = static_cast<float>(tdelta_exact);
        if (c.sink) tdsink64[h] -= std::exp(sink[h] - exact_lse) * ((tsink[h] - mu) * delta_exact + tdelta_exact);
        for (int j = 0; j < length_k; ++j) {
            if (p[j] == 0) continue;
            const T *y = &dout[at * dim_v], *ty = &tdout[at * dim_v], *x = &v[key(j) * dim_v], *tx = &tv[key(j) * dim_v];
            const double dp = dot(y, x, dim_v) - delta_exact, tdp = dot(ty, x, dim_v) + dot(y, tx, dim_v) - tdelta_exact;
            const double below = ts[j] - mu, dz = scale * p[j] * dp, tdz = scale * p[j] * (below * dp + tdp);
            add_scaled(&tdq64[at * dim], tdz, &k[key(j) * dim], dim), add_scaled(&tdq64[at * dim], dz, &tk[key(j) * dim], dim);
            add_scaled(&tdk64[key(j) * dim], tdz, &q[at * dim], dim), add_scaled(&tdk64[key(j) * dim], dz, &tq[at * dim], dim);
            add_scaled(&tdv64[key(j) * dim_v], p[j] * below, y, dim_v), add_scaled(&tdv64[key(j) * dim_v], p[j], ty, dim_v);
        }
    }

    // The error of rows of checked sequences; NaN if a row beyond a used length is not 0.
    double error(const Side& side, const std::vector<T>& got, const std::vector<double>& exact) const {
        RelativeError error;
        const size_t width = side.rows ? got.size() / side.rows : 0;
        for (int b = 0; b < c.batch; ++b)
            for (size_t i = 0; is_checked(b) && i < side.owned[b] * width; ++i) {
                const size_t at = side.start[b] * width + i;
                const bool used = i < side.length[b] * width;
                error.add(used || wide(got[at]) == 0 ? wide(got[at]) : NAN, used ? exact[at] : 0);
            }
        return error.value();
    }
};

bool check(const Case& c) {
    Problem p(c);
    const BackwardTangentPlan plan = p.plan();
    launch_backward_tangent<EmulatedKernel>(plan, p.params, nullptr);
    const double limit = kRounding * std::max(1.0f, c.size * c.size);
    const double tdq = p.error(p.queries, p.tdq, p.tdq64), tdk = p.error(p.keys, p.tdk, p.tdk64),
                 tdv = p.error(p.keys, p.tdv, p.tdv64);
    RelativeError tdsink;
    for (int h = 0; c.sink && c.lengths != Lengths::packed && h < c.heads_q; ++h) tdsink.add(p.tdsink[h], p.tdsink64[h]);
    const bool good = tdq <= limit && tdk <= limit && tdv <= limit && tdsink.value() <= limit;
    std::printf("%s %d x %d heads %d/%d keys %d dim %d/%d window %d %d size %g/%g given %d sink %d lengths %d delta %d: ",
                good ? "ok" : "WRONG", c.batch, c.queries, c.heads_q, c.heads_k, c.keys, c.head_dim, c.head_dim_v, c.left,
                c.right, c.size, c.tangent_size, c.given, c.sink, static_cast<int>(c.lengths), c.delta);
    std::printf("tdq %.1e, tdk %.1e, tdv %.1e, tdsink %.1e\n", tdq, tdk, tdv, tdsink.value());
    return good;
}

int main(int, char** argv) {
    emulation::set_random_order(std::atoi(argv[1]));
    constexpr int kDim = HEAD_DIM;
    bool good = true;
    for (const int dout : {0, 8}) {
        const Case cases[] = {
            {1, 1, 1, 64, 100, kDim, kDim, kAll, kAll, 1, 1, 7 + dout, false},   // one work tile of each side
            {1, 4, 2, 300, 333, kDim, kDim, kAll, 0, 1, 1, 7 + dout, true},      // causal
            {2, 2, 2, 200, 70, kDim, kDim - 8, kAll, 0, 1, 1, 7 + dout, false},  // rows without keys
            {1, 1, 1, 100, 400, kDim - 8, kDim, 90, 30, 1, 1, 7 + dout, false, Lengths::dense, true},  // keys without rows
            {1, 1, 1, 150, 300, kDim, kDim, kAll, kAll, 1, 200, 7 + dout, false},                      // large tangents
            {1, 2, 1, 130, 260, kDim, kDim, kAll, kAll, 1, 4e-3f, 1 + dout, false},                    // small; of q alone
            {1, 1, 1, 130, 200, kDim, kDim, kAll, 0, 1, 1, 2 + dout, false},                           // of k alone
            {1, 1, 1, 130, 200, kDim, kDim, kAll, kAll, 1, 1, 4 + dout, false},                        // of v alone
            {1, 1, 1, 130, 200, kDim, kDim, kAll, kAll, 1, 1, dout, false},      // of none, or of dout alone
            {1, 1, 1, 130, 300, kDim, kDim, kAll, kAll, 4, 1, 7 + dout, false},  // large scores
            {1, 1, 1, 130, 0, kDim, kDim, kAll, kAll, 1, 1, 7 + dout, true},     // no keys but a sink
            {1, 1, 1, 0, 130, kDim, kDim, kAll, kAll, 1, 1, 7 + dout, false},    // no rows
            {3, 2, 1, 210, 250, kDim, kDim, kAll, 0, 1, 1, 7 + dout, false, Lengths::packed, true},
            {3, 1, 1, 150, 140, kDim, kDim, 60, 30, 1, 1, 7 + dout, true, Lengths::used, true},
        };
        for (const Case& c : cases) good &= check(c);
    }
    return good ? 0 : 1;
}
