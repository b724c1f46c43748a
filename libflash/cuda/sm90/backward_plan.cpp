// The backward plan of sm_90a: one thread block per key tile.
#include "cuda/host/backward_plan.h"
#include "cuda/host/problem_params.h"
#include "cuda/kernels.h"
#include "cuda/sm90/backward_instance.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {
namespace {

// See backward_fixed_order.cuh. Without queries there is nothing to add.
void fix_order(BackwardPlan& plan, const Kernel& kernel, const AttentionProblem& problem) {
    plan.fixed_order = plan.statistics.blocks > 0;
    plan.dq_counters = backward_launch(kernel, plan, BackwardStep::dq_counters, plan.statistics.blocks);
    plan.key_schedule.reversed = true;
    plan.workspace.add("dq_counters",
                       backward_workspace_rows(plan, problem) / static_cast<size_t>(plan.tile_q) * sizeof(int32_t));
    plan.workspace.add("next_work_tile", sizeof(int32_t));
}

}  // namespace

BackwardPlan plan_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device) {
    const BackwardInstance kind =
        backward_instance(rare_option(problem), has_lengths_on_device(problem), problem.block_mask.present);
    BackwardPlan plan = common_backward_plan(kernel, problem, {static_cast<int>(kind), backward_kind_name(kind)}, device);
    if (problem.request.deterministic) fix_order(plan, kernel, problem);
    return plan;
}

}  // namespace libflash::cuda::sm90
