// Runs the float64 kernels of forward and backward on the host and compares them with sums in long double. Arguments: 1 the
// options (bits: 1 softcap, ALiBi, bias, mask, sink and a window; 2 dropout; 4 packed sequences with used lengths; 8 block mask;
// 16 the keys are in two calls, by position), 2 the magnitude of the inputs. Prints the errors; exit code 0: none is too large.
#include "problem_f64.h"

void forward(Problem& p, const Call& call) {
    ForwardParams params{};
    call.fill_in(params);
    params.block_mask = call.blocks();
    params.continues = !call.first;
    params.schedule = schedule_params(p.rows_of_queries(), kBatch, kHeads, ForwardKernel::config.tile_q, 1e5, true);
    ForwardPlan plan;
    plan.attention = launch_shape(blocks_of(params.schedule), resources_of_forward<ForwardKernel>(0, 1));
    launch_forward<ForwardKernel>(plan, params, nullptr);
}

int main(int, char** argv) {
    Problem p(std::atoi(argv[1]), std::atof(argv[2]));
    p.solve();
    std::vector<Call> calls;
    for (int part = 0; part < p.parts(); ++part) calls.emplace_back(p, part);
    for (const Call& call : calls) forward(p, call);
    bool good = near("out", p.out, p.exact_out) & near("lse", p.lse, p.exact_lse);
    return good ? 0 : 1;
}
