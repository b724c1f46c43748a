// The forward plan of sm_90a: persistent thread blocks, one per multiprocessor, with a static or a dynamic tile scheduler.
#include <algorithm>

#include "cuda/host/limits.h"
#include "cuda/host/long_sums.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/static_schedule.h"
#include "cuda/host/statistics.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/sm90/forward_instance.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {

namespace {

// Whether a row may have more keys than accumulators can add up accurately.
bool has_too_many_keys(const KernelConfig& config, const AttentionProblem& problem) {
    return forward_has_long_sums(config) && longest_sum(problem, config.tile_q) > most_keys_of_accumulators(config);
}

// Under a causal mask a static schedule pairs long work tiles with short ones; a dynamic schedule begins with the longest.
ScheduleParams schedule_of(int tile_q, bool dynamic, const AttentionProblem& problem) {
    const bool causal = problem.mask_rule.right < MaskRule::kUnbounded, paired = causal && !dynamic;
    // With kL2Bytes as the size of a head, each head group has one head: the thread blocks then share its keys and values in L2.
    ScheduleParams schedule =
        schedule_params(problem.q_rows, problem.batch, problem.heads_q, tile_q * (paired ? 2 : 1), kL2Bytes, causal && !paired);
    schedule.paired = paired;
    return schedule;
}

// The tiles, the schedule and the launch of an instance. The time of the launch is known for a static schedule only.
struct InstancePlan {
    int tile_q, tile_k;
    ScheduleParams schedule;
    StaticLaunch launch;
};

InstancePlan plan_instance(ForwardInstance kind, bool dynamic, const KernelConfig& config, const AttentionProblem& problem,
                           int64_t multiprocessors) {
    InstancePlan plan{forward_tile_q(config, kind), forward_tile_k(config, kind), {}, {}};
    plan.schedule = schedule_of(plan.tile_q, dynamic, problem);
    const int64_t units = blocks_of(plan.schedule);
    plan.launch = {std::min(units, multiprocessors), 0};
    if (dynamic || units == 0) return plan;
    QueryTileTimes times = query_tile_times(problem, plan.tile_q, plan.tile_k);
    if (kind == ForwardInstance::narrow) times.of_key_tile = 79;  // of 100 in the plain instance (TUNING.md)
    plan.launch = set_static_schedule(plan.schedule, problem, times, multiprocessors);
    return plan;
}

}  // namespace

ForwardPlan plan_forward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device) {
    check_sizes(problem);
    const KernelConfig& config = kernel.config;
    if (config.head_dim > 256) return plan_wide_forward(kernel, problem, device);
    ForwardPlan plan;
    plan.vector_loads = loads_in_vectors(problem);
    plan.vector_out = rows_fit_vectors(rows_params(problem.out), problem.head_dim_v, element_bytes(problem.dtype));
    const bool general = has_rare_options(problem) || !plan.vector_loads, lengths_on_device = has_lengths_on_device(problem);
    const bool block_mask = problem.block_mask.present || (!general && has_too_many_keys(config, problem));
    // With sm_margin, other kernels run concurrently and some thread blocks begin late: a dynamic schedule gives these less work.
    plan.dynamic = lengths_on_device || block_mask || problem.request.sm_margin > 0;
    ForwardInstance kind = config.statistics ? forward_statistics_instance(plan.dynamic, problem.entropy.present)
                                             : forward_instance(config, general, plan.dynamic, block_mask);
    const auto plan_of = [&](ForwardInstance of) {
        return plan_instance(of, plan.dynamic, config, problem, device.multiprocessors);
    };
    InstancePlan chosen = plan_of(kind);
    if (kind == ForwardInstance::plain && has_narrow_instance(config)) {
        const InstancePlan narrow = plan_of(ForwardInstance::narrow);
        // A smaller gain than 3 % is within the error of these times.
        if (100 * narrow.launch.time < 97 * chosen.launch.time) chosen = narrow, kind = ForwardInstance::narrow;
    }
    plan.instance = {static_cast<int>(kind), forward_kind_name(kind)};
    plan.tile_q = chosen.tile_q;
    plan.tile_k = chosen.tile_k;
    plan.schedule = chosen.schedule;
    plan_head_maxima(plan, kernel, problem);
    if (problem.batch == 0 || problem.heads_q == 0 || problem.q_rows.capacity == 0) return plan;
    const auto resources = [&](ForwardStep step) { return kernel.resources(static_cast<int>(step), plan.instance.number); };
    plan.attention = launch_shape(chosen.launch.blocks, resources(ForwardStep::attention));
    if (forward_has_long_sums(config, kind)) plan_long_sums(plan, config, problem);
    if (plan.dynamic) {
        plan.order = launch_shape(1, resources(ForwardStep::order));
        plan.workspace.add("sequence_order", sequence_order_bytes(blocks_of(plan.schedule)));
    }
    return plan;
}

}  // namespace libflash::cuda::sm90
