// The plan of backward for sm_80 and later.
#include "cuda/host/backward_plan.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/sm80/backward_tiles.h"
#include "cuda/sm80/plan.h"

namespace libflash::cuda::sm80 {

namespace {

int64_t dbias_blocks(const AttentionProblem& problem, const KernelConfig& config) {
    const int element = element_bytes(config.dtype), tile_q = backward_query_tile(config.head_dim, true, element),
              tile_k = query_rows_tile_k(config.head_dim, element);
    const int64_t* shape = problem.dbias.shape;
    return shape[0] * shape[1] * ceil_div(shape[2], tile_q) * ceil_div(shape[3], tile_k);
}

}  // namespace

BackwardPlan plan_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties&) {
    const KernelConfig& config = kernel.config;
    const bool general = has_rare_options(problem) || !backward_loads_in_vectors(problem);
    BackwardPlan plan = common_backward_plan(kernel, problem, general ? kGeneralInstance : kPlainInstance);
    const int element = element_bytes(config.dtype), tile_q = backward_query_tile(config.head_dim, general, element);
    plan.query_tile_schedule = schedule_params(problem.q_rows, problem.batch, problem.heads_q, tile_q, key_bytes(problem),
                                               problem.mask_rule.right < MaskRule::kUnbounded);
    if (plan.deterministic) {
        plan.dq_tile_q = tile_q;
        plan.dq_tile_k = query_rows_tile_k(config.head_dim, element);
    }
    if (problem.batch == 0 || problem.heads_q == 0) return plan;
    const auto launch = [&](BackwardStep step, int64_t blocks) { return backward_launch(kernel, plan, step, blocks); };
    if (plan.deterministic) plan.dq = launch(BackwardStep::dq, blocks_of(plan.query_tile_schedule));
    if (problem.dbias.present) plan.dbias = launch(BackwardStep::dbias, dbias_blocks(problem, config));
    return plan;
}

}  // namespace libflash::cuda::sm80
