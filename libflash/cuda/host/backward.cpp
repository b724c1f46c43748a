// Backward: fills the kernel parameters from the problem and the plan, and launches the kernels.
#include "cuda/attention/long_sums.h"
#include "cuda/host/launch.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"

namespace libflash::cuda {
namespace {

// Called after fill_in_problem().
void fill_in_gradients(BackwardParams& params, const AttentionProblem& problem) {
    params.dout = rows_params(problem.dout);
    params.dq = rows_params(problem.dq);
    params.dk = rows_params(problem.dk);
    params.dv = rows_params(problem.dv);
    params.dlse = row_statistics_params(problem.dlse);
    params.dsink = head_gradient_params(problem.dsink);
    params.dbias = score_gradient_params(problem.dbias);
    params.delta = row_statistics_params(problem.delta);
    params.adds = problem.adds;
    params.wide_dq = is_wide(problem, problem.dq);
    params.wide_dk = is_wide(problem, problem.dk);
    params.wide_dv = is_wide(problem, problem.dv);
}

void fill_in_splits(SplitTilesParams& params, const BackwardPlan& plan, char* workspace) {
    params.first = static_cast<int32_t>(plan.split_tiles.first);
    params.splits = divisor_params(plan.split_tiles.splits);
    params.count = static_cast<int32_t>(plan.split_tiles.counters);
    params.counters = reinterpret_cast<int32_t*>(workspace + plan.workspace.offset("split_counters"));
    params.sums = reinterpret_cast<float*>(workspace + plan.workspace.offset("split_sums"));
}

BackwardParams make_params(const AttentionProblem& problem, const BackwardPlan& plan, char* workspace) {
    BackwardParams params{};
    fill_in_problem(params, problem);
    fill_in_gradients(params, problem);
    params.heads_k = static_cast<int32_t>(problem.heads_k);
    params.block_rows = block_mask_params(problem.block_mask, true);
    params.block_cols = block_mask_params(problem.block_mask, false);
    params.units = static_cast<int32_t>(plan.units);
    if (problem.q_rows.packed())
        params.first_units = reinterpret_cast<int32_t*>(workspace + plan.workspace.offset("first_units"));
    params.key_schedule = plan.key_schedule;
    params.query_schedule = plan.query_schedule;
    params.query_tile_schedule = plan.query_tile_schedule;
    params.vector_loads = plan.vector_loads;
    params.vector_out = plan.vector_out;
    params.shard = shard_params(problem);
    params.softmax_statistics = reinterpret_cast<SoftmaxStatistics*>(workspace + plan.workspace.offset("statistics"));
    if (problem.heads_q == 0) leave_out_queries(params);
    if (!plan.dq_kernel) params.dq_accumulator = reinterpret_cast<float*>(workspace + plan.workspace.offset("dq_accumulator"));
    if (plan.dynamic) params.next_work_tile = reinterpret_cast<int32_t*>(workspace + plan.workspace.offset("next_work_tile"));
    if (plan.fixed_order) params.dq_counters = reinterpret_cast<int32_t*>(workspace + plan.workspace.offset("dq_counters"));
    if (plan.split_tiles.splits > 1) fill_in_splits(params.split_tiles, plan, workspace);
    if (plan.parts.launches > 1) params.part.sums = reinterpret_cast<float*>(workspace + plan.workspace.offset("gradient_sums"));
    return params;
}

// The gradient of the bias, by a kernel of another architecture: its launcher launches only the steps that have thread blocks.
int launch_bias_gradient(const BackwardPlan& plan, const BackwardParams& params, void* stream) {
    BackwardPlan alone;
    alone.dbias = plan.dbias;
    return plan.dbias_kernel->backward(alone, params, stream);
}

}  // namespace

void backward(const Kernel& kernel, const AttentionProblem& problem, const BackwardPlan& plan, void* workspace, void* stream) {
    const BackwardParams params = make_params(problem, plan, static_cast<char*>(workspace));
    const DeviceGuard guard(problem.device.id);
    check(kernel.backward(plan, params, stream), kernel.config.name);
    if (plan.dbias_kernel) check(launch_bias_gradient(plan, params, stream), plan.dbias_kernel->config.name);
}

}  // namespace libflash::cuda
