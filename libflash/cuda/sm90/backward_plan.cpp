// The backward plan of sm_90a: persistent thread blocks, one per multiprocessor, with a dynamic tile scheduler.
#include <algorithm>

#include "cuda/host/backward_plan.h"
#include "cuda/host/backward_splits.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/sm90/backward_instance.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {
namespace {

// Whether a fixed order begins with the first key tile (README.md).
bool begins_with_first_key_tile(const BackwardPlan& plan, const AttentionProblem& problem) {
    const int64_t heads = plan.parts.launches > 1 ? plan.parts.heads : problem.group_size();  // of a launch
    return heads > 1 && problem.mask_rule.right < MaskRule::kUnbounded &&
           plan.instance.number == static_cast<int>(BackwardInstance::plain);
}

// deterministic=True: backward_fixed_order.cuh.
void fix_order(BackwardPlan& plan, const Kernel& kernel, const AttentionProblem& problem) {
    plan.fixed_order = true;
    plan.dq_counters = backward_launch(kernel, plan, BackwardStep::dq_counters, blocks_of(plan.query_schedule));
    plan.key_schedule.reversed = !begins_with_first_key_tile(plan, problem);
    plan.workspace.add("dq_counters", workspace_rows(plan.units, problem) / static_cast<size_t>(plan.tile_q) * sizeof(int32_t));
}

// Several thread blocks share a unit in the first and in the last step if there is at most one unit for each multiprocessor. With
// more units this would be slower.
void divide_units(BackwardPlan& plan, int64_t multiprocessors) {
    if (plan.statistics.blocks > multiprocessors) return;
    plan.divides_units = true;
    plan.statistics.blocks *= kStatisticsParts;
    plan.dq_conversion.blocks *= dq_conversion_parts(plan.tile_q);
}

void split_key_tiles(BackwardPlan& plan, const Kernel& kernel, const AttentionProblem& problem, int64_t blocks) {
    const auto kind = static_cast<BackwardInstance>(plan.instance.number);
    if (!has_splits(kind) || problem.block_mask.present || plan.parts.launches > 1) return;
    // Instances that support block masks divide query heads, and so does the plain one with a fixed order, if there are several.
    const bool in_order = kind == BackwardInstance::plain && problem.request.deterministic;
    const bool whole_heads = knows_block_mask(kind) || (in_order && problem.group_size() > 1);
    plan.split_tiles = backward_splits(problem, plan, blocks, whole_heads);
    if (plan.split_tiles.splits == 1) return;
    plan.dk_dv.blocks = std::min(plan.work_tiles(), blocks);
    const auto sums = static_cast<size_t>((plan.key_tiles - plan.split_tiles.first) * plan.split_tiles.splits);
    plan.workspace.add("split_counters", static_cast<size_t>(plan.split_tiles.counters) * sizeof(int32_t));
    plan.workspace.add("split_sums", sums * gradient_sums_bytes(plan.tile_k, kernel.config.head_dim));
}

}  // namespace

BackwardPlan plan_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device) {
    if (kernel.config.head_dim > 256) return plan_wide_backward(kernel, problem, device);
    const BackwardInstance kind =
        backward_instance(rare_option(problem), has_lengths_on_device(problem), problem.block_mask.present);
    BackwardPlan plan = common_backward_plan(kernel, problem, {static_cast<int>(kind), backward_kind_name(kind)}, device);
    plan.dk_dv.blocks = std::min<int64_t>(plan.dk_dv.blocks, device.multiprocessors);
    if (plan.statistics.blocks == 0) return plan;  // no queries: nothing to add, and no kernel that sets the counter to 0
    divide_units(plan, device.multiprocessors);
    plan.dynamic = true;
    plan.workspace.add("next_work_tile", sizeof(int32_t));
    split_key_tiles(plan, kernel, problem, device.multiprocessors);
    const int64_t splits = plan.split_tiles.first == 0 ? plan.split_tiles.splits : 1;
    balance_key_tiles(plan.key_schedule, problem, device.multiprocessors, splits);
    if (problem.request.deterministic) fix_order(plan, kernel, problem);
    return plan;
}

}  // namespace libflash::cuda::sm90
