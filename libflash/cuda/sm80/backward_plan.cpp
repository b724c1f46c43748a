// The plan of backward for sm_80 and later.
#include "cuda/host/backward_plan.h"
#include "cuda/attention/query_rows_tiles.h"
#include "cuda/host/limits.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/sm80/backward_tiles.h"
#include "cuda/sm80/plan.h"

namespace libflash::cuda::sm80 {

BackwardPlan plan_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device) {
    const KernelConfig& config = kernel.config;
    const bool wide = is_wide_backward(config.head_dim), one_instance = wide || config.dtype == KernelType::f64_;
    const bool general =
        one_instance || has_rare_options(problem) || has_shard_options(problem) || !backward_loads_in_vectors(problem);
    // Kernels with one instance have no dQ accumulator.
    BackwardPlan plan = common_backward_plan(kernel, problem, general ? kGeneralInstance : kPlainInstance, device,
                                             one_instance || problem.request.deterministic);
    balance_key_tiles(plan.key_schedule, problem, resident_blocks(device, plan.dk_dv));
    const int element = element_bytes(config.dtype);
    const int tile_q = wide ? config.tile_q : query_rows_tile_q(config.head_dim, general, element);
    plan.query_tile_schedule = schedule_params(problem.q_rows, problem.batch, problem.heads_q, tile_q, key_bytes(problem),
                                               problem.mask_rule.right < MaskRule::kUnbounded);
    if (plan.dq_kernel) {
        plan.dq_tile_q = tile_q;
        plan.dq_tile_k = wide ? wide_columns(tile_q, element) : query_rows_tile_k(config.head_dim, element);
    }
    check_block_count("q", blocks_of(plan.query_tile_schedule));
    if (plan.dq_kernel) plan.dq = backward_launch(kernel, plan, BackwardStep::dq, blocks_of(plan.query_tile_schedule));
    if (problem.dbias.present) plan.dbias = plan_bias_gradient(kernel, problem);
    return plan;
}

LaunchShape plan_bias_gradient(const Kernel& kernel, const AttentionProblem& problem) {
    const int head_dim = kernel.config.head_dim, element = element_bytes(kernel.config.dtype);
    const int tile_q = query_rows_tile_q(head_dim, true, element), tile_k = query_rows_tile_k(head_dim, element);
    return launch_shape(tiles_of_bias(problem.dbias, tile_q, tile_k),
                        kernel.resources(static_cast<int>(BackwardStep::dbias), kGeneralInstance.number));
}

}  // namespace libflash::cuda::sm80
