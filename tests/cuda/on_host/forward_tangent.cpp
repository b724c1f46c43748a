// Runs forward_tangent of one kernel on the host and compares it with double precision. Arguments: 1 the size of the inputs, 2
// the size of their tangents, 3 whether the rare options, a block mask and packed rows are used, 4 which tangents are given (bit
// 0: q, 1: k, 2: v), 5 whether no key is in use. Prints the errors; exit code 0 means none is too large.
#include "emulation.h"

#include "cuda/host/tile_schedule.h"
#include "cuda/sm80/forward_tangent.cuh"

using namespace libflash;
using namespace libflash::cuda;

struct TangentKernel {
    static constexpr KernelConfig config{
        "forward_tangent", Operation::forward_tangent, "sm80", KernelType::DTYPE, HEAD_DIM, HEAD_DIM, TANGENT_TILE, 1, ""};
};

#include "tangent_problem.h"

constexpr double kRounding = kFloat ? 0x1p-18 : kRounding16;

struct Problem : TangentProblem {
    std::vector<T> q, k, v, tq, tk, tv, out, tout, dout, tdout;
    std::vector<float> bias, tbias, sink, tsink, lse, tlse, dlse, tdlse, delta, tdelta;
    std::vector<double> to64, mu64, delta64, tdelta64;

    Problem(float size, float tsize, bool rare_options, int which) : TangentProblem(rare_options, which) {
        q = random<T>(kRows * kHeads * kDim, size), k = random<T>(kKeys * kDim, size), v = random<T>(kKeys * kDimV, size);
        tq = random<T>(q.size(), tsize), tk = random<T>(k.size(), tsize), tv = random<T>(v.size(), tsize);
        const size_t outputs = kRows * kHeads * kDimV;
        dout = random<T>(outputs, size), tdout = random<T>(outputs, size);
        bias = random<float>(kHeads * kRows * kKeys, 1), tbias = random<float>(bias.size(), tsize);
        sink = random<float>(kHeads, 1), tsink = random<float>(kHeads, tsize), tdlse = random<float>(kHeads * kRows, 1);
        dlse = random<float>(tdlse.size(), 1);
        out.assign(outputs, T(0.0f)), tout.assign(outputs, T(NAN));
        lse.assign(kHeads * kRows, -INFINITY), tlse.assign(lse.size(), NAN);
        delta.assign(lse.size(), NAN), tdelta = delta;
        to64.assign(outputs, 0), mu64.assign(lse.size(), 0), delta64 = tdelta64 = mu64;
        if (!(given & 1)) tq.assign(tq.size(), T(0.0f));
        if (!(given & 2)) tk.assign(tk.size(), T(0.0f));
        if (!(given & 4)) tv.assign(tv.size(), T(0.0f));
    }

    // Scores of a row and their tangents.
    void score(int row, int head, std::vector<double>& s, std::vector<double>& ts) const {
        for (int j = 0; j < kKeys; ++j) {
            s[j] = -INFINITY, ts[j] = 0;
            if (!sees(row, j)) continue;
            const T *x = &q[at(row, head, kDim)], *y = &k[size_t(j) * kDim];
            s[j] = scale * dot(x, y, kDim);
            ts[j] = scale * (dot(&tq[at(row, head, kDim)], y, kDim) + dot(x, &tk[size_t(j) * kDim], kDim));
            if (!rare) continue;
            const double tanh_z = std::tanh(s[j] / cap);
            ts[j] = ts[j] * (1 - tanh_z * tanh_z) + tbias[(head * kRows + row) * kKeys + j];
            s[j] = cap * tanh_z - slopes[head] * std::abs(row + kKeys - kUsed - j) + bias[(head * kRows + row) * kKeys + j];
        }
    }

    void solve_row(int row, int head) {
        std::vector<double> s(kKeys), ts(kKeys);
        score(row, head, s, ts);
        double sum = rare ? std::exp(double{sink[head]}) : 0;
        for (double x : s) sum += std::exp(x);
        if (row >= kUsed || sum == 0) return;
        const double log_sum = std::log(sum);
        lse[head * kRows + row] = static_cast<float>(log_sum);
        double mu = rare ? std::exp(sink[head] - log_sum) * tsink[head] : 0;
        std::vector<double> o(kDimV);
        for (int j = 0; j < kKeys; ++j) {
            const double p = std::exp(s[j] - log_sum);
            mu += p * ts[j];
            if (p > 0) add_scaled(o.data(), p * keep(row, j, head), &v[j * kDimV], kDimV);
        }
        mu64[head * kRows + row] = mu;
        const size_t first = at(row, head, kDimV);
        for (int j = 0; j < kKeys; ++j) {
            const double p = std::exp(s[j] - log_sum) * (s[j] == -INFINITY ? 0 : keep(row, j, head));
            if (p == 0) continue;
            add_scaled(&to64[first], p * (ts[j] - mu), &v[j * kDimV], kDimV);
            add_scaled(&to64[first], p, &tv[j * kDimV], kDimV);
        }
        double &of_out = delta64[head * kRows + row], &moved = tdelta64[head * kRows + row];
        of_out = -dlse[head * kRows + row], moved = -tdlse[head * kRows + row];
        for (int c = 0; c < kDimV; ++c) {
            out[first + c] = T(static_cast<float>(o[c]));
            of_out += wide(dout[first + c]) * o[c];
            moved += wide(tdout[first + c]) * o[c] + wide(dout[first + c]) * to64[first + c];
        }
    }
};

void run(Problem& p) {
    ForwardTangentParams params{};
    const int32_t used = kUsed, used_keys = p.without_keys ? 0 : kKeys, rows_of_sequence[] = {kBefore, kBefore + kRows},
                  keys_of_sequence[] = {0, kKeys};
    params.q = rows_of(p.q, kHeads, kDim), params.k = rows_of(p.k, 1, kDim), params.v = rows_of(p.v, 1, kDimV);
    if (p.given & 1) params.tq = rows_of(p.tq, kHeads, kDim);
    if (p.given & 2) params.tk = rows_of(p.tk, 1, kDim);
    if (p.given & 4) params.tv = rows_of(p.tv, 1, kDimV);
    params.out = rows_of(p.out, kHeads, kDimV), params.tout = rows_of(p.tout, kHeads, kDimV);
    params.dout = rows_of(p.dout, kHeads, kDimV), params.tdout = rows_of(p.tdout, kHeads, kDimV);
    params.lse = numbers_of(p.lse), params.tlse = numbers_of(p.tlse);
    params.tdlse = numbers_of(p.tdlse), params.tdelta = numbers_of(p.tdelta);
    params.dlse = numbers_of(p.dlse), params.delta = numbers_of(p.delta);
    params.q_lengths = {nullptr, &used, kRows}, params.k_lengths = {nullptr, &used_keys, kKeys};
    params.batch = 1, params.heads_q = params.group_size = kHeads, params.head_dim = kDim, params.head_dim_v = kDimV;
    params.softmax_scale = static_cast<float>(p.scale), params.scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
    params.mask = {kLeft, 0, false};
    params.rare.dropout.keep_factor = 1;
    params.vector_loads = params.vector_rows = params.vector_out = true;
    if (p.rare) {
        params.vector_loads = params.vector_rows = params.vector_out = false;
        params.q_lengths = {rows_of_sequence, &used, kBefore + kRows};
        params.k_lengths = {keys_of_sequence, &used_keys, kKeys};
        for (RowsParams* x : {&params.q, &params.tq, &params.out, &params.tout, &params.dout, &params.tdout})
            x->data = static_cast<T*>(x->data) ? static_cast<T*>(x->data) - kBefore * x->row : nullptr;
        for (RowStatisticsParams* x : {&params.lse, &params.tlse, &params.dlse, &params.tdlse, &params.delta, &params.tdelta})
            x->data -= kBefore;
        params.block_mask.mask = p.blocks.data();
        params.block_mask.mask_stride[2] = 2, params.block_mask.mask_stride[3] = 1;
        params.rare.alibi_slopes = {p.slopes.data(), 0, 1, true};
        params.rare.mask = {p.mask.data(), {0, 0, kKeys, 1}, false};
        params.rare.dropout = p.dropout;
        params.rare.softcap = static_cast<float>(p.cap);
        params.rare.bias = {p.bias.data(), {0, int64_t{kRows} * kKeys, kKeys, 1}, true};
        params.tbias = {p.tbias.data(), {0, int64_t{kRows} * kKeys, kKeys, 1}, true};
        params.sink = {p.sink.data(), 0, 1, true}, params.tsink = {p.tsink.data(), 0, 1, true};
    }
    ForwardTangentPlan plan;
    plan.instance = p.rare ? kGeneralInstance : kPlainInstance;
    params.schedule = schedule_params(side(kRows, params.q_lengths.cu), 1, kHeads,
                                      forward_tangent_tile_q(TangentKernel::config, p.rare), 1e3, true);
    plan.attention =
        launch_shape(blocks_of(params.schedule), resources_of_forward_tangent<TangentKernel>(0, plan.instance.number));
    launch_forward_tangent<TangentKernel>(plan, params, nullptr);
}

int main(int, char** argv) {
    late_copies = true;
    emulation::set_random_order(1);
    const double size = std::atof(argv[1]);
    Problem p(static_cast<float>(size), static_cast<float>(std::atof(argv[2])), std::atoi(argv[3]) != 0, std::atoi(argv[4]));
    p.without_keys = std::atoi(argv[5]) != 0;
    for (int head = 0; head < kHeads; ++head)
        for (int row = 0; row < kRows; ++row) p.solve_row(row, head);
    run(p);
    const double limit = kRounding * size * size, of_sums = 0x1p-18 * size * size;
    bool good = near("tout", p.tout, p.to64, limit) & near("tlse", p.tlse, p.mu64, of_sums);
    good &= near("delta", p.delta, p.delta64, limit) & near("tdelta", p.tdelta, p.tdelta64, limit);
    return good ? 0 : 1;
}
