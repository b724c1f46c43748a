// The plan of forward for wide heads on sm_90a: one thread block per query tile and head.
#include "cuda/host/limits.h"
#include "cuda/host/long_sums.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {

ForwardPlan plan_wide_forward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device) {
    const KernelConfig& config = kernel.config;
    ForwardPlan plan;
    plan.vector_loads = plan.vector_out = true;  // supports_wide_forward()
    plan.instance = {0, "wide heads"};
    plan.tile_q = config.tile_q;
    plan.tile_k = config.tile_k;
    // Under a causal mask later rows see more keys. The tiles with most keys start first.
    const bool longest_last = problem.mask_rule.right < MaskRule::kUnbounded;
    plan.schedule =
        schedule_params(problem.q_rows, problem.batch, problem.heads_q, plan.tile_q, key_bytes(problem), longest_last);
    if (problem.batch == 0 || problem.heads_q == 0 || problem.q_rows.capacity == 0) return plan;
    check_block_count("q", blocks_of(plan.schedule));
    plan.attention = launch_shape(blocks_of(plan.schedule), kernel.resources(static_cast<int>(ForwardStep::attention), 0));
    if (longest_sum(problem, plan.tile_q) > most_keys_of_accumulators(config)) {
        plan.blocks_at_once = kBlocksAtOnce * device.multiprocessors;
        plan_long_sums(plan, config, problem);
    }
    return plan;
}

}  // namespace libflash::cuda::sm90
