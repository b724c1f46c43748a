// The plan of forward_tangent for sm_80 and later: one thread block per query tile and head.
#include "cuda/host/limits.h"
#include "cuda/host/tangent_params.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/sm80/forward_tangent_tiles.h"
#include "cuda/sm80/plan.h"

namespace libflash::cuda::sm80 {

ForwardTangentPlan plan_forward_tangent(const Kernel& kernel, const TangentProblem& problem, const DeviceProperties&) {
    check_sizes(problem);
    const KernelConfig& config = kernel.config;
    ForwardTangentPlan plan;
    const auto fits = [&](const TensorView& tensor) { return optional_fits_vectors(problem, tensor, problem.head_dim_v); };
    plan.vector_loads = tangents_load_in_vectors(problem);
    plan.vector_rows = fits(problem.out) && fits(problem.dout) && fits(problem.tangents.dout);
    plan.vector_out = fits(problem.tangents.out);
    const bool one_instance = config.dtype == KernelType::f64_ || loads_in_turn(config);
    const bool general = has_rare_options(problem) || !plan.vector_loads || one_instance;
    plan.instance = general ? kGeneralInstance : kPlainInstance;
    plan.tile_q = forward_tangent_tile_q(config, general);
    plan.tile_k = config.tile_k;
    // Under a causal mask later rows see more keys. The tiles with most keys start first.
    const bool longest_last = problem.mask_rule.right < MaskRule::kUnbounded;
    const double keys_with_tangents = 2 * key_bytes(problem);
    plan.schedule =
        schedule_params(problem.q_rows, problem.batch, problem.heads_q, plan.tile_q, keys_with_tangents, longest_last);
    if (problem.batch == 0 || problem.heads_q == 0 || problem.q_rows.capacity == 0) return plan;
    check_block_count("q", blocks_of(plan.schedule));
    plan.attention = launch_shape(blocks_of(plan.schedule), kernel.resources(0, plan.instance.number));
    return plan;
}

}  // namespace libflash::cuda::sm80
