// Runs the float64 kernels of forward and backward on the host and compares them with sums in long double. Arguments: 1 the
// options (bits: 1 softcap, ALiBi, bias, mask, sink and a window; 2 dropout; 4 packed sequences with used lengths; 8 block mask;
// 16 the keys are in two calls, by position), 2 the magnitude of the inputs. Prints the errors; exit code 0: none is too large.
#include "problem_f64.h"

#include "cuda/sm80/backward_f64.cuh"
#include "cuda/sm80/forward_f64.cuh"

struct ForwardKernel {
    static constexpr KernelConfig config{
        "forward", Operation::forward, "sm80", KernelType::f64_, HEAD_DIM, HEAD_DIM, FORWARD_TILE, 1, ""};
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
    Problem p(std::atoi(argv[1]), std::atof(argv[2]));
    p.solve();
    std::vector<Call> calls;
    for (int part = 0; part < p.parts(); ++part) calls.emplace_back(p, part);
    for (const Call& call : calls) forward(p, call);
    bool good = near("out", p.out, p.exact_out) & near("lse", p.lse, p.exact_lse);
    for (Call& call : calls) backward(p, call);
    good &= near("dq", p.dq, p.exact_dq) & near("dk", p.dk, p.exact_dk) & near("dv", p.dv, p.exact_dv);
    if (p.rare) good &= near("dsink", p.dsink, p.exact_dsink, kSumsOfRows);
    if (p.rare && !p.parted) good &= near("dbias", p.dbias, p.exact_dbias);
    return good ? 0 : 1;
}
