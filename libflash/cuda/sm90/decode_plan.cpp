// The plans of the sm_90a decode kernels, and the launch of the kernel for shared keys. Both decode kernels support sequences of
// any lengths. The kernel for values in the keys computes all rows of a call; the kernel for many rows leaves long chunks to the
// prefill kernel.
#include <algorithm>

#include "cuda/attention/combine_warps.h"
#include "cuda/host/decode_plan.h"
#include "cuda/host/limits.h"
#include "cuda/host/prefix_tiles.h"
#include "cuda/sm90/decode_prefix_instance.h"
#include "cuda/sm90/decode_rows_instance.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {
namespace {

// The part that both plans have. `launches`: whether there are rows for the decode kernel.
DecodePlan make_plan(const Kernel& kernel, const DecodeSizes& sizes, const Instance& instance, const DecodePrefill& prefill,
                     bool launches) {
    const KernelConfig& config = kernel.config;
    const DecodeProblem& problem = sizes.problem;
    const DecodeSplits splits = launches ? choose_splits(sizes) : DecodeSplits{1, 1};
    DecodePlan plan;
    plan.instance = instance;
    plan.prefill = prefill;
    plan.short_tiles = sizes.short_tiles();
    plan.splits = splits.splits;
    plan.split_size = splits.split_size;
    plan.stores_rotated_q = problem.rotary_cos.present;
    plan.ragged = true;
    plan.tile_q = static_cast<int>(sizes.tile_q());
    plan.tile_k = config.tile_k;
    plan.query_tiles = std::max<int64_t>(1, sizes.query_tiles());
    plan.stages = config.stages;
    plan.dependent_launch = true;
    plan.workspace = decode_workspace(plan, config, problem);
    if (problem.batch == 0 || problem.heads_k == 0) return plan;
    plan_append(plan, kernel, problem);
    if (launches) plan_attention(plan, kernel, sizes);
    return plan;
}

// If the prefill kernel takes the long chunks, the other sequences have few rows, and the workspace has room for tiles of 64
// rows.
int warpgroups_of(const DecodeProblem& problem, const KernelConfig& config, const DecodePrefill& prefill) {
    return !prefill.name && mean_rows(problem) * problem.group_size() > config.tile_q ? 2 : 1;
}

DecodePlan plan_many_rows(const Kernel& kernel, const DecodeProblem& problem, const DeviceProperties& device,
                          const DecodePrefill& prefill) {
    const KernelConfig& config = kernel.config;
    const int warpgroups = warpgroups_of(problem, config, prefill);
    const DecodeTiles tiles{warpgroups * config.tile_q, decode_rows_blocks_at_once(warpgroups)};
    const DecodeSizes sizes(config, problem, device, prefill.plan.fewest_rows, tiles);
    const bool all_long = prefill.name && !problem.q_rows.packed();  // every sequence has the same number of rows
    DecodePlan plan = make_plan(kernel, sizes, warpgroups == 2 ? kDecodeOf128Rows : kDecodeOf64Rows, prefill, !all_long);
    plan.stages = decode_rows_stages(config, warpgroups);
    // combine_few_splits.cuh: a warp for each row.
    if (are_few_splits(plan.splits, config.head_dim_v) && plan.short_tiles == 0)
        plan.combine.blocks = ceil_div(plan.combine.blocks, combine_warps(config.head_dim_v));
    return plan;
}

}  // namespace

DecodePlan plan_decode(const Kernel& kernel, const DecodeProblem& problem, const DeviceProperties& device,
                       const DecodePrefill& prefill) {
    check_sizes(problem);
    if (!has_values_in_keys(kernel.config)) return plan_many_rows(kernel, problem, device, prefill);
    const DecodeSizes sizes(kernel.config, problem, device, 0);
    DecodePlan plan = make_plan(kernel, sizes, {0, "values in the keys"}, {}, true);
    plan.in_pairs =
        !problem.q_rows.packed() && ceil_div(sizes.group_rows(), sizes.tile_q()) % 2 == 0 && device.multiprocessors > 1;
    return plan;
}

// A thread block with one consumer warpgroup takes little more than half of the time of a thread block with two: so 64 rows if
// all thread blocks then still run at once. Otherwise 128 rows, which read the keys half as often.
void plan_prefix(DecodePlan& plan, const Kernel& kernel, const DecodeProblem& problem, const DeviceProperties& device) {
    plan.prefix_kernel = {kernel.config.name, kernel.decode_prefix};
    KernelResources resources = kernel.resources(0, 0);
    const auto launch = [&](int rows) {
        resources.threads = decode_prefix_threads(rows);
        plan_prefix_launch(plan, problem, rows, resources);
    };
    launch(kPrefixGroupRows);
    if (plan.prefix.blocks > device.multiprocessors) launch(kernel.config.tile_q);
}

}  // namespace libflash::cuda::sm90
