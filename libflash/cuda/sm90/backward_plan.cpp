// The backward plan of sm_90a: persistent thread blocks, one per multiprocessor, with a dynamic tile scheduler.
#include <algorithm>

#include "cuda/host/backward_plan.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/sm90/backward_instance.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {
namespace {

// Under a causal mask the groups of heads that suit the L2 cache alone would leave thread blocks idle at the end.
void balance(ScheduleParams& schedule, const AttentionProblem& problem, const DeviceProperties& device) {
    const MaskRule& mask = problem.mask_rule;
    if (mask.right == MaskRule::kUnbounded || mask.left < MaskRule::kUnbounded || problem.k_rows.packed()) return;
    const int64_t group = group_for_balance(schedule.heads, schedule.tiles, device.multiprocessors);
    if (group > 0) set_group(schedule, group);
}

// deterministic=True: backward_fixed_order.cuh.
void fix_order(BackwardPlan& plan, const Kernel& kernel, const AttentionProblem& problem) {
    plan.fixed_order = true;
    plan.dq_counters = backward_launch(kernel, plan, BackwardStep::dq_counters, plan.statistics.blocks);
    plan.key_schedule.reversed = true;
    plan.workspace.add("dq_counters", workspace_rows(plan.units, problem) / static_cast<size_t>(plan.tile_q) * sizeof(int32_t));
}

}  // namespace

BackwardPlan plan_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device) {
    if (kernel.config.head_dim > 256) return plan_wide_backward(kernel, problem, device);
    const BackwardInstance kind =
        backward_instance(rare_option(problem), has_lengths_on_device(problem), problem.block_mask.present);
    BackwardPlan plan = common_backward_plan(kernel, problem, {static_cast<int>(kind), backward_kind_name(kind)}, device);
    plan.dk_dv.blocks = std::min<int64_t>(plan.dk_dv.blocks, device.multiprocessors);
    balance(plan.key_schedule, problem, device);
    if (plan.statistics.blocks == 0) return plan;  // no queries: nothing to add, and no kernel that sets the counter to 0
    plan.dynamic = true;
    plan.workspace.add("next_work_tile", sizeof(int32_t));
    if (problem.request.deterministic) fix_order(plan, kernel, problem);
    return plan;
}

}  // namespace libflash::cuda::sm90
