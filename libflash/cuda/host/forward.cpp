// Forward: fills the kernel parameters from the problem and the plan, and launches the kernel.
#include "cuda/host/launch.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/host/statistics.h"
#include "cuda/kernels.h"

namespace libflash::cuda {
namespace {

ForwardStatisticsParams make_params(const AttentionProblem& problem, const ForwardPlan& plan, char* workspace) {
    ForwardStatisticsParams params{};
    fill_in_problem(params, problem);
    params.block_mask = block_mask_params(problem.block_mask, true);
    params.schedule = plan.schedule;
    params.vector_loads = plan.vector_loads;
    params.vector_out = plan.vector_out;
    params.shard = shard_params(problem);
    params.continues = problem.continues;
    params.wide_out = is_wide(problem, problem.out);
    params.entropy = row_statistics_params(problem.entropy);
    if (wants_head_maxima(problem)) {
        params.head_maxima = static_cast<float*>(problem.max_logit.data);
        params.head_maxima_stride = problem.max_logit.stride[0];
    } else {
        params.max_logit = row_statistics_params(problem.max_logit);
    }
    if (plan.long_sums) params.long_sums = reinterpret_cast<float*>(workspace + plan.workspace.offset("long_sums"));
    if (plan.dynamic && plan.attention.blocks > 0)
        params.sequence_order = reinterpret_cast<int32_t*>(workspace + plan.workspace.offset("sequence_order"));
    return params;
}

}  // namespace

void forward(const Kernel& kernel, const AttentionProblem& problem, const ForwardPlan& plan, void* workspace, void* stream) {
    if (plan.attention.blocks == 0 && plan.head_maxima.blocks == 0) return;
    const ForwardStatisticsParams params = make_params(problem, plan, static_cast<char*>(workspace));
    const DeviceGuard guard(problem.device.id);
    check(kernel.forward(plan, params, stream), kernel.config.name);
}

}  // namespace libflash::cuda
