// The backward_tangent plan of sm_90a: statistics of the query rows, a kernel for tdq, and a kernel for tdk and tdv. The latter
// two have persistent thread blocks, one per multiprocessor, with a dynamic tile scheduler.
#include <algorithm>

#include "cuda/host/backward_plan.h"
#include "cuda/host/limits.h"
#include "cuda/host/tangent_params.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/sm90/backward_tangent_instance.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {
namespace {

// As in the other plans: heads whose inputs fit in L2 together are processed together, and under a causal mask thread blocks with
// much work start first, in groups of key heads that divide the work equally.
void plan_schedules(BackwardTangentPlan& plan, const TangentProblem& problem, const DeviceProperties& device) {
    const bool longest_last = problem.mask_rule.right < MaskRule::kUnbounded;
    const auto row_bytes = static_cast<double>(2 * element_bytes(problem.dtype) * (problem.head_dim + problem.head_dim_v));
    const double query_bytes = row_bytes * static_cast<double>(problem.q_rows.max_length * problem.group_size());
    plan.unit_schedule = schedule_params(problem.q_rows, problem.batch, problem.heads_q, kUnitRows, kL2Bytes, false);
    plan.query_schedule =
        schedule_params(problem.q_rows, problem.batch, problem.heads_q, plan.tile_q, 2 * key_bytes(problem), longest_last);
    plan.key_schedule = schedule_params(problem.k_rows, problem.batch, problem.heads_k, plan.tile_q, query_bytes, false);
    balance_key_tiles(plan.key_schedule, problem, device.multiprocessors);
}

}  // namespace

BackwardTangentPlan plan_backward_tangent(const Kernel& kernel, const TangentProblem& problem, const DeviceProperties& device) {
    check_sizes(problem);
    BackwardTangentPlan plan;
    plan.instance = problem.tangents.dout.present ? kMovingDoutInstance : kConstantDoutInstance;
    plan.tile_q = kernel.config.tile_q;
    plan.tile_k = kernel.config.tile_k;
    plan.units = units_of(problem);
    plan.vector_loads = plan.vector_out = true;  // supports_tangent() sees to it
    plan.vector_rows = outputs_load_in_vectors(problem);
    plan.workspace.add("statistics", workspace_rows(plan.units, problem) * sizeof(TangentStatistics));
    add_first_units(plan.workspace, problem);
    plan_schedules(plan, problem, device);
    const auto launch = [&](const char* argument, BackwardTangentStep step, int64_t blocks) {
        check_block_count(argument, blocks);
        return launch_shape(blocks, kernel.resources(static_cast<int>(step), plan.instance.number));
    };
    plan.statistics = launch("q", BackwardTangentStep::statistics, blocks_of(plan.unit_schedule));
    plan.tdq = launch("q", BackwardTangentStep::gradients, blocks_of(plan.query_schedule));
    plan.tdk_tdv = launch("k", BackwardTangentStep::gradients_of_keys, blocks_of(plan.key_schedule));
    if (plan.statistics.blocks > 0 && !has_kernel_for_each_gradient(kernel.config)) {  // else no kernel zeroes the counters
        plan.dynamic = true;
        plan.workspace.add("next_tiles", 2 * sizeof(int32_t));
        for (LaunchShape* shape : {&plan.tdq, &plan.tdk_tdv})
            shape->blocks = std::min<int64_t>(shape->blocks, device.multiprocessors);
    }
    if (problem.tangents.dsink.present) plan.dsink = launch("q", BackwardTangentStep::dsink, problem.heads_q);
    return plan;
}

}  // namespace libflash::cuda::sm90
