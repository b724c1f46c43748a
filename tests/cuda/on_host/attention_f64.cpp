// Runs the float64 kernels of forward and backward on the host and compares them with sums in long double. Arguments: 1 the
// options (bits: 1 softcap, ALiBi, bias, mask, sink and a window; 2 dropout; 4 packed sequences with used lengths; 8 block mask;
// 16 the keys are divided into two calls with positions), 2 the magnitude of the inputs. Prints the errors; exit code 0: none is
// too large.
#include "problem_f64.h"

#include "cuda/sm80/backward_f64.cuh"
#include "cuda/sm80/forward_f64.cuh"
#include "cuda/sm80/forward_statistics_f64.cuh"

struct ForwardKernel {
    static constexpr KernelConfig config{
        "forward", Operation::forward, "sm80", KernelType::f64_, HEAD_DIM, HEAD_DIM, FORWARD_TILE, 1, ""};
};
struct StatisticsKernel {
    static constexpr KernelConfig config{
        "forward", Operation::forward, "sm80", KernelType::f64_, HEAD_DIM, HEAD_DIM, STATISTICS_TILE, 1, "", "", true};
};
struct BackwardKernel {
    static constexpr KernelConfig config{
        "backward", Operation::backward, "sm80", KernelType::f64_, HEAD_DIM, HEAD_DIM, BACKWARD_TILE, 1, ""};
};

void forward(Problem& p, const Call& call) {
    ForwardParams params{};
    call.fill_in(params);
    call.fill_in_shard(params);
    params.block_mask = call.blocks();
    params.continues = !call.first;
    params.schedule = schedule_params(p.rows_of_queries(), kBatch, kHeads, ForwardKernel::config.tile_q, 1e5, true);
    ForwardPlan plan;
    plan.attention = launch_shape(blocks_of(params.schedule), resources_of_forward<ForwardKernel>(0, 1));
    launch_forward<ForwardKernel>(plan, params, nullptr);
}

// Largest scores of rows or of heads, and entropies.
struct Statistics {
    Numbers rows, heads, entropy;
    Exact exact_rows, exact_heads, exact_entropy;

    explicit Statistics(const Problem& p)
        : rows(p.lse.size(), NAN), heads(kHeads, NAN), entropy(rows), exact_rows(rows.size(), -INFINITY),
          exact_heads(kHeads, -INFINITY), exact_entropy(rows.size(), 0) {
        for (int b = 0; b < kBatch; ++b)
            for (int h = 0; h < kHeads; ++h)
                for (int i = 0; i < p.used_q[b]; ++i) solve_row(p, b, h, i);
    }
    void solve_row(const Problem& p, int b, int h, int i) {
        const size_t at = p.lse_at(b, h, i);
        Exact s(p.used_k[b]), tanh_z(s);
        p.score(b, h, i, s, tanh_z);
        if (p.rare) s.push_back(p.sink[h]);
        for (Real x : s)
            if (const Real gap = x - p.exact_lse[at], share = std::exp(gap); share > 0) exact_entropy[at] -= share * gap;
        if (p.rare) s.pop_back();
        for (Real x : s) exact_rows[at] = std::max(exact_rows[at], x);
        exact_heads[h] = std::max(exact_heads[h], exact_rows[at]);
    }
    void launch(Problem& p, const Call& call, bool of_heads) {
        ForwardStatisticsParams params{};
        call.fill_in(params);
        call.fill_in_shard(params);
        params.block_mask = call.blocks();
        params.entropy = call.numbers(entropy);
        if (of_heads) {
            params.head_maxima = reinterpret_cast<float*>(heads.data()), params.head_maxima_stride = 1;
        } else {
            params.max_logit = call.numbers(rows);
        }
        params.schedule = schedule_params(p.rows_of_queries(), kBatch, kHeads, StatisticsKernel::config.tile_q, 1e5, true);
        ForwardPlan plan;
        const auto shape = [&](ForwardStep step, int64_t blocks) {
            return launch_shape(blocks, resources_of_forward_statistics<StatisticsKernel>(static_cast<int>(step), 1));
        };
        plan.attention = shape(ForwardStep::attention, blocks_of(params.schedule));
        if (of_heads) plan.head_maxima = shape(ForwardStep::head_maxima, 1);
        launch_forward_statistics<StatisticsKernel>(plan, params, nullptr);
    }
};

bool statistics(Problem& p, const Call& call) {
    Statistics made(p);
    p.out.assign(p.out.size(), NAN), p.lse.assign(p.lse.size(), NAN);
    made.launch(p, call, false);
    bool good = near("out beside statistics", p.out, p.exact_out) & near("lse beside statistics", p.lse, p.exact_lse) &
                near("entropy", made.entropy, made.exact_entropy) & near("max_logit", made.rows, made.exact_rows);
    made.launch(p, call, true);
    return good & near("max_logit of heads", made.heads, made.exact_heads);
}

void backward(Problem& p, Call& call) {
    BackwardParams params{};
    call.fill_in(params);
    call.fill_in_shard(params);
    Numbers dk(call.k.size(), NAN), dv(call.v.size(), NAN);
    params.dout = call.rows(p.dout, kRows, kHeads, kDimV), params.dq = call.rows(p.dq, kRows, kHeads, kDim);
    params.dk = call.rows(dk, call.keys(), kKeyHeads, kDim), params.dv = call.rows(dv, call.keys(), kKeyHeads, kDimV);
    if (call.first) params.dlse = call.numbers(p.dlse);
    if (p.parted) params.delta = call.numbers(p.delta);
    params.adds = !call.first;
    if (params.adds) dk.assign(dk.size(), 0), dv.assign(dv.size(), 0);
    params.heads_k = kKeyHeads;
    params.block_rows = params.block_cols = call.blocks();
    if (params.sink.data) params.dsink = {p.dsink.data(), 1, false};
    if (params.rare.bias.data)
        params.dbias = {
            p.dbias.data(), {0, int64_t{2} * kRows * 2 * kKeys, 2 * kKeys, 1}, {1, kHeads, 2 * kRows, 2 * kKeys}, false};

    const Sequences queries = p.rows_of_queries();
    params.units = p.packed ? 2 * kRows / kUnitRows + kBatch : (kRows + kUnitRows - 1) / kUnitRows;
    std::vector<DoubleStatistics> statistics((p.packed ? 1 : kBatch) * kHeads * params.units * kUnitRows, {NAN, NAN});
    params.softmax_statistics = reinterpret_cast<SoftmaxStatistics*>(statistics.data());
    std::vector<int32_t> first_units(kBatch, -1);
    params.first_units = first_units.data();
    const int tile_q = query_rows_tile_q(HEAD_DIM, true, 8), tile_k = query_rows_tile_k(HEAD_DIM, 8);
    params.key_schedule =
        schedule_params(p.rows_of_keys(call.keys()), kBatch, kKeyHeads, BackwardKernel::config.tile_k, 1e5, false);
    params.query_schedule = schedule_params(queries, kBatch, kHeads, kUnitRows, 1e9, false);
    params.query_tile_schedule = schedule_params(queries, kBatch, kHeads, tile_q, 1e5, true);
    BackwardPlan plan;
    const auto shape = [&](BackwardStep step, int64_t blocks) {
        return launch_shape(blocks, resources_of_backward<BackwardKernel>(static_cast<int>(step), 1));
    };
    plan.statistics = shape(BackwardStep::statistics, blocks_of(params.query_schedule));
    plan.dk_dv = shape(BackwardStep::dk_dv, blocks_of(params.key_schedule));
    plan.dq = shape(BackwardStep::dq, blocks_of(params.query_tile_schedule));
    if (params.dsink.data) plan.dsink = shape(BackwardStep::dsink, kHeads);
    if (params.dbias.data)
        plan.dbias = shape(BackwardStep::dbias, kHeads * ceil_div(2 * kRows, tile_q) * ceil_div(2 * kKeys, tile_k));
    launch_backward<BackwardKernel>(plan, params, nullptr);
    call.put(p.dk, dk, kDim), call.put(p.dv, dv, kDimV);
}

int main(int, char** argv) {
    late_copies = true;
    emulation::set_random_order(1);
    Problem p(std::atoi(argv[1]), std::atof(argv[2]));
    p.solve();
    std::vector<Call> calls;
    for (int part = 0; part < p.parts(); ++part) calls.emplace_back(p, part);
    for (const Call& call : calls) forward(p, call);
    bool good = near("out", p.out, p.exact_out) & near("lse", p.lse, p.exact_lse);
    if (!p.parted) good &= statistics(p, calls[0]);
    for (Call& call : calls) backward(p, call);
    good &= near("dq", p.dq, p.exact_dq) & near("dk", p.dk, p.exact_dk) & near("dv", p.dv, p.exact_dv);
    if (p.rare) good &= near("dsink", p.dsink, p.exact_dsink, kSumsOfRows);
    if (p.rare && !p.parted) good &= near("dbias", p.dbias, p.exact_dbias);
    return good ? 0 : 1;
}
