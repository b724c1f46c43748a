// The plan of forward for sm_80 and later: one thread block per query tile and head.
#include "cuda/host/limits.h"
#include "cuda/host/long_sums.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/host/statistics.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/machine_code.h"
#include "cuda/sm80/forward_instance.h"
#include "cuda/sm80/plan.h"

namespace libflash::cuda::sm80 {

ForwardPlan plan_forward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device) {
    check_sizes(problem);
    const KernelConfig& config = kernel.config;
    ForwardPlan plan;
    plan.vector_loads = loads_in_vectors(problem);
    plan.vector_out = rows_fit_vectors(rows_params(problem.out), problem.head_dim_v,
                                       is_wide(problem, problem.out) ? 4 : element_bytes(problem.dtype));
    const bool is_double = config.dtype == KernelType::f64_;  // float64 kernels have one instance
    const bool one_instance = is_double || config.statistics;
    const bool general = has_rare_options(problem) || has_shard_options(problem) || !plan.vector_loads || one_instance;
    plan.tile_q = config.tile_q;
    const bool long_sums = needs_long_sums(config, longest_sum(problem, plan.tile_q));
    plan.instance = one_instance ? kGeneralInstance : forward_instance_sm80(config, general, long_sums);
    plan.tile_k = one_instance ? config.tile_k
                               : forward_tile_k_sm80(config, general, long_sums,
                                                     code_version(config.compiled_for, config.versions, device.arch));
    plan_head_maxima(plan, kernel, problem);
    // Under a causal mask later rows see more keys. The tiles with most keys start first.
    const bool longest_last = problem.mask_rule.right < MaskRule::kUnbounded;
    plan.schedule =
        schedule_params(problem.q_rows, problem.batch, problem.heads_q, plan.tile_q, key_bytes(problem), longest_last);
    if (problem.batch == 0 || problem.heads_q == 0 || problem.q_rows.capacity == 0) return plan;
    check_block_count("q", blocks_of(plan.schedule));
    const int step = static_cast<int>(ForwardStep::attention);
    plan.attention = launch_shape(blocks_of(plan.schedule), kernel.resources(step, plan.instance.number));
    if (long_sums) plan.blocks_at_once = kBlocksAtOnce * device.multiprocessors;
    plan_long_sums(plan, config, problem);
    return plan;
}

}  // namespace libflash::cuda::sm80
