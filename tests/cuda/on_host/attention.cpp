// Runs the sm80 forward and backward kernels of one instance on the host and compares them with double precision. Arguments: 1
// the size of the inputs, 2 whether the rare options are used, 3 whether backward is deterministic. Prints the errors; exit
// code 0 means none is too large.
#include "attention_kernels.h"

#include <cstdio>
#include <cstdlib>

#include "cuda/host/long_sums.h"

constexpr int kRows = 150, kKeys = 200, kHeads = 2, kLeft = 120;  // two query heads share one key head; causal

std::mt19937 generator(3);
template <class Number>
std::vector<Number> random(size_t count, float scale) {
    return random<Number>(count, scale, generator);
}

struct Problem {
    bool rare;
    double scale = 1 / std::sqrt(double{kDim}), cap = 9;
    std::vector<T> q, k, v, dout, out, dq, dk, dv;
    std::vector<float> lse, bias, dbias, sink, dsink;
    // Exact.
    std::vector<double> o64, lse64, dq64, dk64, dv64, dbias64, dsink64;
    std::vector<double> dsink_squares;  // of the terms of dsink, each of a row and a channel

    Problem(float size, bool rare_options) : rare(rare_options) {
        q = random<T>(kRows * kHeads * kDim, size), k = random<T>(kKeys * kDim, size), v = random<T>(kKeys * kDim, size);
        dout = random<T>(q.size(), size);
        bias = random<float>(kHeads * kRows * kKeys, 1), sink = random<float>(kHeads, 1);
        for (auto* x : {&out, &dq}) x->assign(q.size(), T(NAN));
        for (auto* x : {&dk, &dv}) x->assign(k.size(), T(NAN));
        lse.assign(kHeads * kRows, NAN), dbias.assign(bias.size(), NAN), dsink.assign(kHeads, NAN);
        for (auto* x : {&o64, &dq64}) x->assign(q.size(), 0);
        for (auto* x : {&dk64, &dv64}) x->assign(k.size(), 0);
        lse64.assign(lse.size(), 0), dbias64.assign(bias.size(), 0);
        for (auto* x : {&dsink64, &dsink_squares}) x->assign(kHeads, 0);
    }

    size_t at(int row, int head) const { return (size_t{static_cast<size_t>(row)} * kHeads + head) * kDim; }
    static bool sees(int row, int key) { return key <= row + kKeys - kRows && key >= row + kKeys - kRows - kLeft; }

    // Scores of a row and their slopes under the softcap.
    void score(int row, int head, std::vector<double>& s, std::vector<double>& slope) const {
        for (int j = 0; j < kKeys; ++j) {
            s[j] = -INFINITY, slope[j] = 1;
            if (!sees(row, j)) continue;
            s[j] = scale * dot(&q[at(row, head)], &k[size_t{static_cast<size_t>(j)} * kDim], kDim);
            if (!rare) continue;
            const double tanh_z = std::tanh(s[j] / cap);
            slope[j] = 1 - tanh_z * tanh_z;
            s[j] = cap * tanh_z + bias[(head * kRows + row) * kKeys + j];
        }
    }

    void solve_row(int row, int head) {
        std::vector<double> s(kKeys), slope(kKeys);
        score(row, head, s, slope);
        double sum = rare ? std::exp(double{sink[head]}) : 0;
        for (double x : s) sum += std::exp(x);
        const double log_sum = lse64[head * kRows + row] = std::log(sum);
        double* o = &o64[at(row, head)];
        for (int j = 0; j < kKeys; ++j) {
            const double p = std::exp(s[j] - log_sum);
            if (p > 0) add_scaled(o, p, &v[j * kDim], kDim);
        }
        // Backward gets the rounded output.
        double delta = 0, squares = 0;
        for (int c = 0; c < kDim; ++c) {
            const double term = wide(T(static_cast<float>(o[c]))) * wide(dout[at(row, head) + c]);
            delta += term, squares += term * term;
        }
        if (rare) {
            const double p_sink = std::exp(sink[head] - log_sum);
            dsink64[head] -= p_sink * delta, dsink_squares[head] += p_sink * p_sink * squares;
        }
        for (int j = 0; j < kKeys; ++j) {
            const double p = std::exp(s[j] - log_sum), ds = p * (dot(&dout[at(row, head)], &v[j * kDim], kDim) - delta);
            if (p == 0) continue;
            dbias64[(head * kRows + row) * kKeys + j] = ds;
            add_scaled(&dq64[at(row, head)], scale * slope[j] * ds, &k[j * kDim], kDim);
            add_scaled(&dk64[j * kDim], scale * slope[j] * ds, &q[at(row, head)], kDim);
            add_scaled(&dv64[j * kDim], p, &dout[at(row, head)], kDim);
        }
    }

    template <class Params>
    void fill_in(Params& params) {
        params.q = dense_rows(q, kHeads), params.k = dense_rows(k, 1), params.v = dense_rows(v, 1);
        params.out = dense_rows(out, kHeads);
        params.lse = {lse.data(), int64_t{kHeads} * kRows, 1, kRows};
        fill_in_sizes(params, kRows, kKeys, kHeads, scale);
        params.shard.heads_total = kHeads;
        params.mask = {kLeft, 0, false};
        if (!rare) return;
        params.rare.softcap = static_cast<float>(cap);
        params.rare.bias = {bias.data(), {0, int64_t{kRows} * kKeys, kKeys, 1}, true};
        params.sink = {sink.data(), 0, 1, true};
    }
};

void forward(Problem& p) {
    ForwardParams params{};
    p.fill_in(params);
    params.schedule = schedule_params(one_sequence(kRows), 1, kHeads, ForwardKernel::config.tile_q, 1e3, true);
    ForwardPlan plan;
    const bool long_sums = needs_long_sums(ForwardKernel::config, kKeys);
    plan.instance = forward_instance_sm80(ForwardKernel::config, p.rare, long_sums);
    plan.attention = launch_shape(blocks_of(params.schedule), resources_of_forward<ForwardKernel>(0, plan.instance.number));
    std::vector<float> sums;
    if (long_sums) {
        plan.blocks_at_once = 3;  // of four
        sums.assign(plan.blocks_at_once * long_sums_bytes(ForwardKernel::config.tile_q, kDim) / sizeof(float) + 1, NAN);
        sums.back() = 7;  // a guard
        params.long_sums = sums.data();
    }
    launch_forward<ForwardKernel>(plan, params, nullptr);
    if (!sums.empty() && sums.back() != 7) std::exit(2);
}

void backward(Problem& p, bool deterministic) {
    BackwardParams params{};
    p.fill_in(params);
    params.dout = dense_rows(p.dout, kHeads), params.dq = dense_rows(p.dq, kHeads);
    params.dk = dense_rows(p.dk, 1), params.dv = dense_rows(p.dv, 1);
    if (p.rare) {
        params.dbias = {p.dbias.data(), {0, int64_t{kRows} * kKeys, kKeys, 1}, {1, kHeads, kRows, kKeys}, true};
        params.dsink = {p.dsink.data(), 1, true};
    }
    BackwardLaunch launch(params, p.rare ? kGeneralInstance : kPlainInstance, p.rare, deterministic);
    BackwardPlan& plan = launch.plan;
    if (p.rare) {
        const int tile_q = query_rows_tile_q(kDim, true, sizeof(T)), tile_k = query_rows_tile_k(kDim, sizeof(T));
        plan.dsink = launch.shape(BackwardStep::dsink, kHeads);
        plan.dbias = launch.shape(BackwardStep::dbias, kHeads * ceil_div(kRows, tile_q) * ceil_div(kKeys, tile_k));
    }
    plan.parts = backward_parts(BackwardKernel::config, kRows, kRows, kHeads);
    std::vector<float> gradient_sums;
    if (plan.parts.launches > 1) {
        plan.parts.key_tiles = 3;
        gradient_sums.assign(3 * gradient_sums_bytes(BackwardKernel::config.tile_k, kDim) / sizeof(float) + 1, NAN);
        gradient_sums.back() = 7;  // a guard
        params.part.sums = gradient_sums.data();
    }
    launch_backward<BackwardKernel>(plan, params, nullptr);
    if (!gradient_sums.empty() && gradient_sums.back() != 7) std::exit(2);
}

// Checks the root mean square of the relative error, and that no value that bf16 or float can represent became 0 (fp16
// probabilities end at 2^-25).
template <class Number>
bool near(const char* name, const std::vector<Number>& got, const std::vector<double>& exact, double limit) {
    RelativeError error;
    int lost = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        error.add(wide(got[i]), exact[i]);
        lost += kRounding != 0x1p-11 && wide(got[i]) == 0 && std::fabs(exact[i]) > 0x1p-124;
    }
    const double relative = error.value();
    const bool good = relative <= limit && lost == 0;
    std::printf("%s %s: relative error %.2e, limit %.1e, %d lost\n", good ? "ok" : "WRONG", name, relative, limit, lost);
    return good;
}

// The terms of dsink have different signs and may nearly cancel: the error is relative to the root of the sum of their squares.
bool dsink_is_near(const Problem& p, double limit) {
    double most = 0;
    for (int head = 0; head < kHeads; ++head)
        most = larger_error(most, std::fabs(p.dsink[head] - p.dsink64[head]) / std::sqrt(p.dsink_squares[head]));
    std::printf("%s dsink: error %.2e of its terms, limit %.1e\n", most <= limit ? "ok" : "WRONG", most, limit);
    return most <= limit;
}

int main(int, char** argv) {
    late_copies = true;
    emulation::set_random_order(1);
    const double size = std::atof(argv[1]);
    Problem p(static_cast<float>(size), std::atoi(argv[2]) != 0);
    for (int head = 0; head < kHeads; ++head)
        for (int row = 0; row < kRows; ++row) p.solve_row(row, head);
    forward(p);
    // The rounding error of a score, and with it the relative error of a probability, grows with the score. For 16-bit types
    // the rounding of the result is larger.
    const double limit = kFloat ? kRounding * size * size : kRounding;
    bool good = near("out", p.out, p.o64, limit) & near("lse", p.lse, p.lse64, 0x1p-18);
    backward(p, std::atoi(argv[3]) != 0);
    good &= near("dq", p.dq, p.dq64, 2 * limit) & near("dk", p.dk, p.dk64, 2 * limit) & near("dv", p.dv, p.dv64, limit);
    // The output that backward reads is not the rounded exact one, but has an error of its own of the same size.
    if (p.rare) good &= near("dbias", p.dbias, p.dbias64, limit) & dsink_is_near(p, 4 * limit);
    return good ? 0 : 1;
}
