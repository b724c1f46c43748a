// The plan of backward for wide heads on sm_90a: for each gradient one thread block per tile of its rows and head.
#include "cuda/host/backward_plan.h"
#include "cuda/host/limits.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {

BackwardPlan plan_wide_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device) {
    BackwardPlan plan = common_backward_plan(kernel, problem, {0, "wide heads"}, device, true);
    plan.dq_tile_q = plan.tile_q;
    plan.dq_tile_k = plan.tile_k;
    // Under a causal mask later rows see more keys; the tiles with most keys start first.
    plan.query_tile_schedule = schedule_params(problem.q_rows, problem.batch, problem.heads_q, plan.tile_q, key_bytes(problem),
                                               problem.mask_rule.right < MaskRule::kUnbounded);
    check_block_count("q", blocks_of(plan.query_tile_schedule));
    plan.dq = backward_launch(kernel, plan, BackwardStep::dq, blocks_of(plan.query_tile_schedule));
    return plan;
}

}  // namespace libflash::cuda::sm90
