// Runs the float64 kernels of forward_tangent and backward_tangent on the host and compares them with sums in long double.
// Arguments: 1 the options (bits 1, 2, 4 and 8 of attention_f64.cpp), 2 which tangents are given (bits: 1 q, 2 k, 4 v, 8 dout;
// the others are zero), 3 whether backward_tangent takes delta and tdelta from forward_tangent. With the rare options it also
// tests the tangent of dbias, for a bias that all sequences share and for a bias of one number per sequence. Prints the errors;
// exit code 0: none is too large.
#include "problem_f64.h"

#include "cuda/sm80/backward_tangent_f64.cuh"
#include "cuda/sm80/forward_tangent_f64.cuh"

struct ForwardKernel {
    static constexpr KernelConfig config{
        "forward_tangent", Operation::forward_tangent, "sm80", KernelType::f64_, HEAD_DIM, HEAD_DIM, TANGENT_TILE, 1, ""};
};
struct BackwardKernel {
    static constexpr KernelConfig config{
        "backward_tangent", Operation::backward_tangent, "sm80", KernelType::f64_, HEAD_DIM, HEAD_DIM, TANGENT_TILE, 1, ""};
};

struct TangentProblem : Problem {
    int given;
    Numbers tq, tk, tv, tdout, tbias, tsink, tdlse;
    Numbers tout, tlse, delta, tdelta, tdq, tdk, tdv, tdsink;
    Exact exact_tlse, exact_delta, exact_tdelta, exact_tdsink;
    ExactSums exact_tout, exact_tdq, exact_tdk, exact_tdv;
    Exact exact_tds;  // [sequence][head][row][key]

    TangentProblem(int options, int which) : Problem(options, 1), given(which) {
        tq = tangent(1, q), tk = tangent(2, k), tv = tangent(4, v), tdout = tangent(8, dout);
        tbias = random(bias.size(), 1), tsink = random(kHeads, 1), tdlse = random(lse.size(), 1);
        const double common = tk[0];  // the tangents of scores have a mean
        for (double& x : tk) x += common;
        tout.assign(out.size(), NAN), tlse.assign(lse.size(), NAN), delta = tdelta = tlse;
        tdq.assign(q.size(), NAN), tdk.assign(k.size(), NAN), tdv.assign(v.size(), NAN), tdsink.assign(kHeads, NAN);
        exact_tlse.assign(lse.size(), 0), exact_delta = exact_tdelta = exact_tlse;
        exact_tout.assign(out.size()), exact_tdq.assign(q.size()), exact_tdk.assign(k.size()), exact_tdv.assign(v.size());
        exact_tdsink.assign(kHeads, 0), exact_tds.assign(kBatch * bias.size(), 0);
    }
    Numbers tangent(int bit, const Numbers& like) const { return given & bit ? random(like.size(), 1) : Numbers(like.size(), 0); }

    void solve_tangents() {
        solve();
        for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<double>(exact_out[i]);
        for (size_t i = 0; i < lse.size(); ++i) lse[i] = static_cast<double>(exact_lse[i]);
        for (int b = 0; b < kBatch; ++b)
            for (int h = 0; h < kHeads; ++h)
                for (int i = 0; i < used_q[b]; ++i)
                    if (!std::isinf(lse[lse_at(b, h, i)])) solve_row(b, h, i);
    }
    void solve_row(int b, int h, int i) {
        const size_t row = row_at(b, i) * kHeads + h, of_row = lse_at(b, h, i);
        const int keys = used_k[b];
        Exact s(keys), tanh_z(keys), p(keys), keep(keys), tz(keys), ts(keys);
        score(b, h, i, s, tanh_z);
        const Real p0 = rare ? std::exp(sink[h] - exact_lse[of_row]) : 0;
        Real mu = p0 * tsink[h];
        for (int j = 0; j < keys; ++j) {
            p[j] = std::exp(s[j] - exact_lse[of_row]), keep[j] = keeps(b, h, i, j) ? keep_factor() : 0;
            const size_t key = key_at(b, j) * kKeyHeads + h / kGroup;
            tz[j] = scale * (exact_dot(&tq[row * kDim], &k[key * kDim], kDim) + exact_dot(&q[row * kDim], &tk[key * kDim], kDim));
            ts[j] = (1 - tanh_z[j] * tanh_z[j]) * tz[j] + (rare ? tbias[score_at(h, i, j)] : 0);
            mu += p[j] * ts[j];
        }
        exact_tlse[of_row] = mu;
        exact_tout.add(row * kDimV, -mu, &out[row * kDimV], kDimV);
        for (int j = 0; j < keys; ++j) {
            const size_t at = (key_at(b, j) * kKeyHeads + h / kGroup) * kDimV;
            if (keep[j] == 0 || p[j] == 0) continue;
            exact_tout.add(row * kDimV, keep[j] * p[j] * ts[j], &v[at], kDimV);
            exact_tout.add(row * kDimV, keep[j] * p[j], &tv[at], kDimV);
        }
        Real delta = -dlse[of_row], more = -tdlse[of_row];
        for (int c = 0; c < kDimV; ++c) {
            const size_t at = row * kDimV + c;
            delta += Real{dout[at]} * out[at], more += Real{tdout[at]} * out[at] + dout[at] * exact_tout[at];
        }
        exact_delta[of_row] = delta, exact_tdelta[of_row] = more;
        if (rare) exact_tdsink[h] -= p0 * ((tsink[h] - mu) * delta + more);
        for (int j = 0; j < keys; ++j) {
            if (p[j] == 0) continue;
            const size_t key = key_at(b, j) * kKeyHeads + h / kGroup;
            const Real slope = 1 - tanh_z[j] * tanh_z[j];
            const Real dp = keep[j] * exact_dot(&dout[row * kDimV], &v[key * kDimV], kDimV);
            const Real tdp = keep[j] * (exact_dot(&tdout[row * kDimV], &v[key * kDimV], kDimV) +
                                        exact_dot(&dout[row * kDimV], &tv[key * kDimV], kDimV));
            exact_tds[b * bias.size() + score_at(h, i, j)] = p[j] * ((ts[j] - mu) * (dp - delta) + tdp - more);
            const Real x = slope * (dp - delta), y = slope * (tdp - more) - 2 * tanh_z[j] * tz[j] / cap * x;
            const Real dz = scale * p[j] * x, tdz = scale * p[j] * ((ts[j] - mu) * x + y);
            exact_tdq.add(row * kDim, tdz, &k[key * kDim], kDim), exact_tdq.add(row * kDim, dz, &tk[key * kDim], kDim);
            exact_tdk.add(key * kDim, tdz, &q[row * kDim], kDim), exact_tdk.add(key * kDim, dz, &tq[row * kDim], kDim);
            const Real weight = keep[j] * p[j];
            exact_tdv.add(key * kDimV, weight * (ts[j] - mu), &dout[row * kDimV], kDimV);
            exact_tdv.add(key * kDimV, weight, &tdout[row * kDimV], kDimV);
        }
    }
};

template <class Params>
void fill_in(Params& params, TangentProblem& p, const Call& call) {
    call.fill_in(params);
    params.tq = call.rows(p.tq, kRows, kHeads, kDim), params.tk = call.rows(p.tk, kKeys, kKeyHeads, kDim);
    params.tv = call.rows(p.tv, kKeys, kKeyHeads, kDimV), params.tdout = call.rows(p.tdout, kRows, kHeads, kDimV);
    params.dout = call.rows(p.dout, kRows, kHeads, kDimV), params.tout = call.rows(p.tout, kRows, kHeads, kDimV);
    RowsParams* const tangents[] = {&params.tq, &params.tk, &params.tv, &params.tdout};
    for (int i = 0; i < 4; ++i)
        if (!(p.given >> i & 1)) *tangents[i] = {};
    params.tlse = call.numbers(p.tlse), params.tdlse = call.numbers(p.tdlse), params.tdelta = call.numbers(p.tdelta);
    params.dlse = call.numbers(p.dlse), params.delta = call.numbers(p.delta);
    if (!p.rare) return;
    params.tbias = params.rare.bias, params.tbias.data = p.tbias.data();
    params.tsink = {p.tsink.data(), 0, 1, false};
}

void forward_tangent(TangentProblem& p, const Call& call) {
    ForwardTangentParams params{};
    fill_in(params, p, call);
    params.block_mask = call.blocks();
    params.schedule = schedule_params(p.rows_of_queries(), kBatch, kHeads, ForwardKernel::config.tile_q, 1e5, true);
    ForwardTangentPlan plan;
    plan.attention = launch_shape(blocks_of(params.schedule), resources_of_forward_tangent<ForwardKernel>(0, 1));
    launch_forward_tangent<ForwardKernel>(plan, params, nullptr);
}

LaunchShape shape_of(BackwardTangentStep step, int64_t blocks) {
    return launch_shape(blocks, resources_of_backward_tangent<BackwardKernel>(static_cast<int>(step), 1));
}

// A launch for the tangent of dbias alone, after the statistics of the rows are there.
bool computes_dbias(const TangentProblem& p, BackwardTangentParams params, int batch, int heads, int rows, int keys) {
    Numbers made(size_t(batch) * heads * rows * keys, NAN);
    Exact exact(made.size(), 0);
    for (size_t i = 0; i < p.exact_tds.size(); ++i) {
        const int key = i % (2 * kKeys), row = i / (2 * kKeys) % (2 * kRows), head = i / p.score_at(1, 0, 0) % kHeads;
        const int entry = i / p.bias.size() % batch;
        exact[((entry * heads + head % heads) * rows + row % rows) * keys + key % keys] += p.exact_tds[i];
    }
    params.tdbias = {
        made.data(), {int64_t{heads} * rows * keys, int64_t{rows} * keys, keys, 1}, {batch, heads, rows, keys}, false};
    BackwardTangentPlan plan;
    const int tile = BackwardKernel::config.tile_q;
    plan.dbias = shape_of(BackwardTangentStep::gradients, int64_t{batch} * heads * ceil_div(rows, tile) * ceil_div(keys, tile));
    launch_backward_tangent<BackwardKernel>(plan, params, nullptr);
    return near("tdbias", made, exact, rows > 1 ? 0x1p-46 : kSumsOfRows);
}
bool makes_all_biases(const TangentProblem& p, const BackwardTangentParams& params) {
    return computes_dbias(p, params, 1, kHeads, 2 * kRows, 2 * kKeys) & computes_dbias(p, params, kBatch, 1, 1, 1);
}

// Returns false if a tangent of dbias is wrong.
bool backward_tangent(TangentProblem& p, const Call& call, bool takes_deltas) {
    BackwardTangentParams params{};
    fill_in(params, p, call);
    if (takes_deltas) {
        params.out = params.tout = {}, params.dlse = params.tdlse = {};
    } else {
        params.delta = params.tdelta = {};
    }
    params.heads_k = kKeyHeads;
    params.tdq = call.rows(p.tdq, kRows, kHeads, kDim), params.tdk = call.rows(p.tdk, kKeys, kKeyHeads, kDim);
    params.tdv = call.rows(p.tdv, kKeys, kKeyHeads, kDimV);
    if (p.rare) params.tdsink = {p.tdsink.data(), 1, false};
    params.block_rows = params.block_cols = call.blocks();
    params.part.end_row = INT32_MAX;
    params.units = p.packed ? 2 * kRows / kUnitRows + kBatch : (kRows + kUnitRows - 1) / kUnitRows;
    std::vector<DoubleTangentStatistics> statistics((p.packed ? 1 : kBatch) * kHeads * params.units * kUnitRows);
    params.statistics = reinterpret_cast<TangentStatistics*>(statistics.data());
    std::vector<int32_t> first_units(kBatch, -1);
    params.first_units = first_units.data();
    const int tile = BackwardKernel::config.tile_q;
    params.unit_schedule = schedule_params(p.rows_of_queries(), kBatch, kHeads, kUnitRows, 1e9, false);
    params.query_schedule = schedule_params(p.rows_of_queries(), kBatch, kHeads, tile, 1e5, true);
    params.key_schedule = schedule_params(p.rows_of_keys(kKeys), kBatch, kKeyHeads, tile, 1e5, false);
    BackwardTangentPlan plan;
    plan.statistics = shape_of(BackwardTangentStep::statistics, blocks_of(params.unit_schedule));
    plan.tdq = shape_of(BackwardTangentStep::gradients, blocks_of(params.query_schedule));
    plan.tdk = plan.tdv = shape_of(BackwardTangentStep::gradients, blocks_of(params.key_schedule));
    if (p.rare) plan.dsink = shape_of(BackwardTangentStep::dsink, kHeads);
    launch_backward_tangent<BackwardKernel>(plan, params, nullptr);
    return !p.rare || makes_all_biases(p, params);
}

int main(int, char** argv) {
    late_copies = true;
    TangentProblem p(std::atoi(argv[1]), std::atoi(argv[2]));
    p.solve_tangents();
    const Call call(p, 0);
    forward_tangent(p, call);
    bool good = near("tout", p.tout, p.exact_tout) & near("tlse", p.tlse, p.exact_tlse);
    good &= near("delta", p.delta, p.exact_delta) & near("tdelta", p.tdelta, p.exact_tdelta);
    good &= backward_tangent(p, call, std::atoi(argv[3]) != 0);
    good &= near("tdq", p.tdq, p.exact_tdq) & near("tdk", p.tdk, p.exact_tdk) & near("tdv", p.tdv, p.exact_tdv);
    if (p.rare) good &= near("tdsink", p.tdsink, p.exact_tdsink, kSumsOfRows);
    return good ? 0 : 1;
}
