// Forward: fills the kernel parameters from the problem and the plan, and launches the kernel.
#include "cuda/host/launch.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/kernels.h"

namespace libflash::cuda {
namespace {

ForwardParams make_params(const AttentionProblem& problem, const ForwardPlan& plan, char* workspace) {
    ForwardParams params{};
    fill_in_problem(params, problem);
    params.block_mask = block_mask_params(problem.block_mask, true);
    params.schedule = plan.schedule;
    params.vector_loads = plan.vector_loads;
    params.vector_out = plan.vector_out;
    params.shard = shard_params(problem);
    params.continues = problem.continues;
    params.wide_out = is_wide(problem, problem.out);
    if (plan.long_sums) params.long_sums = reinterpret_cast<float*>(workspace + plan.workspace.offset("long_sums"));
    if (plan.dynamic) params.sequence_order = reinterpret_cast<int32_t*>(workspace + plan.workspace.offset("sequence_order"));
    return params;
}

}  // namespace

void forward(const Kernel& kernel, const AttentionProblem& problem, const ForwardPlan& plan, void* workspace, void* stream) {
    if (plan.attention.blocks == 0) return;
    const ForwardParams params = make_params(problem, plan, static_cast<char*>(workspace));
    const DeviceGuard guard(problem.device.id);
    check(kernel.forward(plan, params, stream), kernel.config.name);
}

}  // namespace libflash::cuda
