// The plan of the prefill kernels of sm_90a: as the plan of forward with lengths on the device.
#include <algorithm>

#include "cuda/attention/long_sums.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/sm90/forward_instance.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/prefill_tiles.h"

namespace libflash::cuda::sm90 {

namespace {

constexpr int64_t kMostOrderBlocks = 16;  // thread blocks that copy a schedule, which is small

}  // namespace

PrefillPlan plan_prefill(const Kernel& kernel, const DecodeProblem& problem, const DeviceProperties& device) {
    const KernelConfig& config = kernel.config;
    const ForwardInstance instance = prefill_instance(problem);
    PrefillPlan plan;
    if (!pays_for_prefill(config, problem, device.multiprocessors)) return plan;
    plan.instance = {static_cast<int>(instance), forward_kind_name(instance)};
    plan.invariant = instance == ForwardInstance::invariant;
    plan.multiprocessors = device.multiprocessors;
    plan.tile_q = forward_tile_q(config, instance);
    plan.tile_k = forward_tile_k(config, instance);
    plan.fewest_rows = fewest_prefill_rows(plan.tile_q, instance);
    const bool causal = problem.mask_rule.right < MaskRule::kUnbounded;
    // With kL2Bytes as the size of a head, each head group has one head, as in forward.
    plan.schedule = schedule_params(problem.q_rows, problem.batch, problem.heads_q, plan.tile_q, kL2Bytes, causal);
    const auto resources = [&](ForwardStep step) { return kernel.resources(static_cast<int>(step), static_cast<int>(instance)); };
    const int64_t tiles = blocks_of(plan.schedule);
    plan.in_pairs = instance == ForwardInstance::cache && prefill_has_pairs(config) && problem.group_size() % 2 == 0 &&
                    device.multiprocessors > 1;
    const int64_t blocks = std::min<int64_t>(tiles, device.multiprocessors);  // with pairs, `tiles` is even
    plan.attention = launch_shape(plan.in_pairs ? blocks / 2 * 2 : blocks, resources(ForwardStep::attention));
    plan.workspace.add("sequence_order", sequence_order_bytes(tiles));
    const int64_t units = tiles / (1 + plan.in_pairs);
    plan.schedule_bytes = schedule_bytes(units);
    plan.order_is_given = problem.schedule.present && !problem.writes_schedule;
    const KernelResources of_order = resources(ForwardStep::order);
    plan.order = launch_shape(plan.order_is_given ? std::min(ceil_div(units, of_order.threads), kMostOrderBlocks) : 1, of_order);
    plan.long_sums = !plan.invariant && needs_long_sums(config, longest_prefill_sum(problem, plan.tile_q));
    if (plan.long_sums)
        plan.workspace.add("long_sums",
                           static_cast<size_t>(plan.attention.blocks) * long_sums_bytes(plan.tile_q, config.head_dim_v));
    return plan;
}

}  // namespace libflash::cuda::sm90
