// Runs backward_tangent of one kernel on the host and compares it with double precision. Arguments: 1 the size of the inputs, 2
// the size of their tangents, 3 whether the rare options, a block mask and packed rows are used, 4 which tangents are given (bit
// 0: q, 1: k, 2: v, 3: dout; bit 4: delta and tdelta are given instead of out, tout, dlse and tdlse). With the rare options it
// also tests the tangent of dbias, for a whole bias and for biases that are broadcast. Prints the errors; exit code 0 means none
// is too large.
#include "emulation.h"

#include "cuda/host/tile_schedule.h"
#include "cuda/sm80/backward_tangent.cuh"

using namespace libflash;
using namespace libflash::cuda;

struct TangentKernel {
    static constexpr KernelConfig config{
        "backward_tangent", Operation::backward_tangent, "sm80", KernelType::DTYPE, HEAD_DIM, HEAD_DIM, TANGENT_TILE, 1, ""};
};

#include "tangent_problem.h"

constexpr double kRounding = kFloat ? 0x1p-17 : kRounding16;

struct Problem : TangentProblem {
    std::vector<T> q, k, v, dout, tq, tk, tv, tdout, out, tout, tdq, tdk, tdv;
    std::vector<float> bias, tbias, sink, tsink, lse, tlse, dlse, tdlse, delta, tdelta;
    std::vector<float> tdsink = std::vector<float>(kHeads, NAN);
    std::vector<double> dq64, dk64, dv64, dsink64 = std::vector<double>(kHeads);
    std::vector<double> ds64 = std::vector<double>(size_t{kHeads} * kRows * kKeys);  // tangents of the gradients of the scores

    Problem(float size, float tsize, bool rare_options, int which) : TangentProblem(rare_options, which) {
        const size_t queries = kRows * kHeads;
        q = random<T>(queries * kDim, size), k = random<T>(kKeys * kDim, size), v = random<T>(kKeys * kDimV, size);
        dout = random<T>(queries * kDimV, size);
        tq = random<T>(q.size(), which & 1 ? tsize : 0), tk = random<T>(k.size(), which & 2 ? tsize : 0);
        tv = random<T>(v.size(), which & 4 ? tsize : 0), tdout = random<T>(dout.size(), which & 8 ? tsize : 0);
        bias = random<float>(queries * kKeys, 1), tbias = random<float>(bias.size(), tsize);
        sink = random<float>(kHeads, 1), tsink = random<float>(kHeads, tsize);
        dlse = random<float>(queries, 1), tdlse = random<float>(queries, tsize);
        out.assign(dout.size(), T(0.0f)), tout = out;
        lse.assign(queries, -INFINITY), tlse.assign(queries, 0), delta.assign(queries, 0), tdelta = delta;
        tdq.assign(q.size(), T(NAN)), tdk.assign(k.size(), T(NAN)), tdv.assign(v.size(), T(NAN));
        dq64.assign(q.size(), 0), dk64.assign(k.size(), 0), dv64.assign(v.size(), 0);
    }

    // A score, its tangent, its slope under the softcap and the tangent of that slope.
    struct Score {
        double s, ts, g, tg;
    };
    Score score(int row, int j, int head) const {
        const T *x = &q[at(row, head, kDim)], *y = &k[size_t(j) * kDim];
        Score made{scale * dot(x, y, kDim), 0, 1, 0};
        made.ts = scale * (dot(&tq[at(row, head, kDim)], y, kDim) + dot(x, &tk[size_t(j) * kDim], kDim));
        if (!rare) return made;
        const double tanh_z = std::tanh(made.s / cap);
        made.g = 1 - tanh_z * tanh_z;
        made.tg = -2 * tanh_z * made.g * made.ts / cap;
        made.ts = made.ts * made.g + tbias[(head * kRows + row) * kKeys + j];
        made.s = cap * tanh_z - slopes[head] * std::abs(row + kKeys - kUsed - j) + bias[(head * kRows + row) * kKeys + j];
        return made;
    }

    void solve_row(int row, int head) {
        std::vector<Score> of(kKeys);
        double sum = rare ? std::exp(double{sink[head]}) : 0, mu = rare ? sum * tsink[head] : 0;
        for (int j = 0; j < kKeys; ++j) {
            if (!sees(row, j)) continue;
            of[j] = score(row, j, head);
            sum += std::exp(of[j].s), mu += std::exp(of[j].s) * of[j].ts;
        }
        if (row >= kUsed || sum == 0) return;
        mu /= sum;
        const size_t at_q = at(row, head, kDim), at_out = at(row, head, kDimV), number = head * kRows + row;
        lse[number] = static_cast<float>(std::log(sum)), tlse[number] = static_cast<float>(mu);
        std::vector<double> o(kDimV), to(kDimV);
        const auto p_of = [&](int j) { return sees(row, j) ? std::exp(of[j].s) / sum : 0; };
        for (int j = 0; j < kKeys; ++j) {
            const double p = p_of(j) * keep(row, j, head);
            if (p == 0) continue;
            add_scaled(o.data(), p, &v[j * kDimV], kDimV);
            add_scaled(to.data(), p * (of[j].ts - mu), &v[j * kDimV], kDimV);
            add_scaled(to.data(), p, &tv[j * kDimV], kDimV);
        }
        double of_out = -dlse[number], moved = -tdlse[number];
        for (int c = 0; c < kDimV; ++c) {
            out[at_out + c] = T(static_cast<float>(o[c])), tout[at_out + c] = T(static_cast<float>(to[c]));
            // If the kernel reads out and tout, they are rounded.
            const double x = given & 16 ? o[c] : wide(out[at_out + c]), y = given & 16 ? to[c] : wide(tout[at_out + c]);
            of_out += wide(dout[at_out + c]) * x, moved += wide(tdout[at_out + c]) * x + wide(dout[at_out + c]) * y;
        }
        delta[number] = static_cast<float>(of_out), tdelta[number] = static_cast<float>(moved);
        if (rare) dsink64[head] -= std::exp(sink[head]) / sum * ((tsink[head] - mu) * of_out + moved);
        for (int j = 0; j < kKeys; ++j) {
            if (!sees(row, j)) continue;
            const double p = p_of(j), r = keep(row, j, head), below = of[j].ts - mu;
            const double dp = r * dot(&dout[at_out], &v[j * kDimV], kDimV);
            const double tdp =
                r * (dot(&tdout[at_out], &v[j * kDimV], kDimV) + dot(&dout[at_out], &tv[size_t(j) * kDimV], kDimV));
            const double ds = p * (dp - of_out), tds = p * below * (dp - of_out) + p * (tdp - moved);
            ds64[number * kKeys + j] = tds;
            const double dz = scale * of[j].g * ds, tdz = scale * (of[j].tg * ds + of[j].g * tds);
            add_scaled(&dq64[at_q], tdz, &k[j * kDim], kDim), add_scaled(&dq64[at_q], dz, &tk[j * kDim], kDim);
            add_scaled(&dk64[j * kDim], tdz, &q[at_q], kDim), add_scaled(&dk64[j * kDim], dz, &tq[at_q], kDim);
            add_scaled(&dv64[j * kDimV], r * p * below, &dout[at_out], kDimV);
            add_scaled(&dv64[j * kDimV], r * p, &tdout[at_out], kDimV);
        }
    }
};

// The rare options, with packed rows whose first ones belong to no sequence.
void use_rare_options(BackwardTangentParams& params, Problem& p) {
    for (RowsParams* x : {&params.q, &params.tq, &params.out, &params.tout, &params.dout, &params.tdout, &params.tdq})
        x->data = x->data ? static_cast<T*>(x->data) - kBefore * x->row : nullptr;
    for (RowStatisticsParams* x : {&params.lse, &params.tlse, &params.dlse, &params.tdlse, &params.delta, &params.tdelta})
        x->data = x->data ? x->data - kBefore : nullptr;
    params.vector_loads = params.vector_rows = params.vector_out = false;
    params.block_rows.mask = params.block_cols.mask = p.blocks.data();
    params.block_rows.mask_stride[2] = params.block_cols.mask_stride[2] = 2;
    params.block_rows.mask_stride[3] = params.block_cols.mask_stride[3] = 1;
    params.rare.alibi_slopes = {p.slopes.data(), 0, 1, true};
    params.rare.mask = {p.mask.data(), {0, 0, kKeys, 1}, false};
    params.rare.dropout = p.dropout;
    params.sink = {p.sink.data(), 0, 1, true}, params.tsink = {p.tsink.data(), 0, 1, true};
    params.tdsink = {p.tdsink.data(), 1, true};
    params.rare.softcap = static_cast<float>(p.cap);
    params.rare.bias = {p.bias.data(), {0, int64_t{kRows} * kKeys, kKeys, 1}, true};
    params.tbias = {p.tbias.data(), {0, int64_t{kRows} * kKeys, kKeys, 1}, true};
}

// A launch for the tangent of dbias alone, after the statistics of the rows are there.
bool computes_dbias(const Problem& p, BackwardTangentParams params, int heads, int rows, int keys) {
    std::vector<float> made(size_t(heads) * rows * keys, NAN);
    std::vector<double> exact(made.size());
    for (size_t i = 0; i < p.ds64.size(); ++i) {
        const int key = i % kKeys, row = i / kKeys % kRows, head = i / kKeys / kRows;
        exact[(head % heads * rows + row % rows) * keys + key % keys] += p.ds64[i];
    }
    params.tdbias = {made.data(), {0, int64_t{rows} * keys, keys, 1}, {1, heads, rows, keys}, true};
    BackwardTangentPlan plan;
    constexpr KernelConfig kernel = TangentKernel::config;
    plan.dbias = launch_shape(int64_t{heads} * ceil_div(rows, kernel.tile_q) * ceil_div(keys, kernel.tile_k),
                              resources_of_backward_tangent<TangentKernel>(static_cast<int>(BackwardTangentStep::gradients), 1));
    launch_backward_tangent<TangentKernel>(plan, params, nullptr);
    return near("tdbias", made, exact, kRounding);
}
bool makes_all_biases(const Problem& p, const BackwardTangentParams& params) {
    return computes_dbias(p, params, kHeads, kRows, kKeys) & computes_dbias(p, params, 1, 1, kKeys) &
           computes_dbias(p, params, kHeads, kRows, 1);
}

// Returns false if a tangent of dbias is wrong.
bool run(Problem& p) {
    BackwardTangentParams params{};
    const int32_t used = kUsed, rows_of_sequence[] = {kBefore, kBefore + kRows}, keys_of_sequence[] = {0, kKeys};
    params.q = rows_of(p.q, kHeads, kDim), params.k = rows_of(p.k, 1, kDim), params.v = rows_of(p.v, 1, kDimV);
    params.out = rows_of(p.out, kHeads, kDimV), params.dout = rows_of(p.dout, kHeads, kDimV),
    params.tout = rows_of(p.tout, kHeads, kDimV);
    if (p.given & 1) params.tq = rows_of(p.tq, kHeads, kDim);
    if (p.given & 2) params.tk = rows_of(p.tk, 1, kDim);
    if (p.given & 4) params.tv = rows_of(p.tv, 1, kDimV);
    if (p.given & 8) params.tdout = rows_of(p.tdout, kHeads, kDimV);
    params.tdq = rows_of(p.tdq, kHeads, kDim), params.tdk = rows_of(p.tdk, 1, kDim), params.tdv = rows_of(p.tdv, 1, kDimV);
    params.lse = numbers_of(p.lse), params.tlse = numbers_of(p.tlse);
    if (p.given & 16) {
        params.out = params.tout = {};
        params.delta = numbers_of(p.delta), params.tdelta = numbers_of(p.tdelta);
    } else {
        params.dlse = numbers_of(p.dlse), params.tdlse = numbers_of(p.tdlse);
    }
    params.q_lengths = {nullptr, &used, kRows}, params.k_lengths = {nullptr, nullptr, kKeys};
    if (p.rare) {
        params.q_lengths = {rows_of_sequence, &used, kBefore + kRows};
        params.k_lengths = {keys_of_sequence, nullptr, kKeys};
    }
    params.batch = params.heads_k = 1, params.heads_q = params.group_size = kHeads;
    params.head_dim = kDim, params.head_dim_v = kDimV;
    params.softmax_scale = static_cast<float>(p.scale), params.scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
    params.mask = {kLeft, 0, false};
    params.rare.dropout.keep_factor = 1;
    params.vector_loads = params.vector_rows = params.vector_out = true;
    params.part.end_row = INT32_MAX;
    params.units = (kBefore + kRows) / kUnitRows + 1;
    std::vector<TangentStatistics> statistics(kHeads * params.units * kUnitRows, TangentStatistics{NAN, NAN, NAN, NAN});
    params.statistics = statistics.data();
    int32_t first_unit = -1;
    params.first_units = &first_unit;
    if (p.rare) use_rare_options(params, p);
    const Sequences queries = side(kRows, params.q_lengths.cu), keys = side(kKeys, params.k_lengths.cu);
    params.unit_schedule = schedule_params(queries, 1, kHeads, kUnitRows, 1e3, false);
    params.query_schedule = schedule_params(queries, 1, kHeads, TangentKernel::config.tile_q, 1e3, true);
    params.key_schedule = schedule_params(keys, 1, 1, TangentKernel::config.tile_q, 1e3, false);
    BackwardTangentPlan plan;
    const auto launch = [](BackwardTangentStep step, const ScheduleParams& schedule) {
        return launch_shape(blocks_of(schedule), resources_of_backward_tangent<TangentKernel>(static_cast<int>(step), 1));
    };
    plan.statistics = launch(BackwardTangentStep::statistics, params.unit_schedule);
    plan.tdq = launch(BackwardTangentStep::gradients, params.query_schedule);
    plan.tdk = plan.tdv = launch(BackwardTangentStep::gradients, params.key_schedule);
    if (p.rare)
        plan.dsink =
            launch_shape(kHeads, resources_of_backward_tangent<TangentKernel>(static_cast<int>(BackwardTangentStep::dsink), 1));
    launch_backward_tangent<TangentKernel>(plan, params, nullptr);
    return !p.rare || makes_all_biases(p, params);
}

int main(int, char** argv) {
    late_copies = true;
    emulation::set_random_order(1);
    const double size = std::atof(argv[1]);
    Problem p(static_cast<float>(size), static_cast<float>(std::atof(argv[2])), std::atoi(argv[3]) != 0, std::atoi(argv[4]));
    for (int head = 0; head < kHeads; ++head)
        for (int row = 0; row < kRows; ++row) p.solve_row(row, head);
    bool good = run(p);
    const double limit = kRounding * size * size;
    good &= near("tdq", p.tdq, p.dq64, limit) & near("tdk", p.tdk, p.dk64, limit) & near("tdv", p.tdv, p.dv64, limit);
    if (p.rare) good &= near("tdsink", p.tdsink, p.dsink64, limit);
    return good ? 0 : 1;
}
