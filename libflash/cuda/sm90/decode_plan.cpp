// The plan of the sm_90a decode kernel. It takes rows of any lengths, so all rows of a call are its own.
#include <algorithm>

#include "cuda/host/decode_plan.h"
#include "cuda/host/limits.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {

DecodePlan plan_decode(const Kernel& kernel, const DecodeProblem& problem, const DeviceProperties& device, const DecodePrefill&) {
    check_sizes(problem);
    const KernelConfig& config = kernel.config;
    const DecodeSizes sizes(config, problem, device, 0);
    const DecodeSplits splits = choose_splits(sizes);
    DecodePlan plan;
    plan.instance = {0, "values in the keys"};
    plan.splits = splits.splits;
    plan.split_size = splits.split_size;
    plan.stores_rotated_q = problem.rotary_cos.present;
    plan.ragged = true;
    plan.tile_q = config.tile_q;
    plan.tile_k = config.tile_k;
    plan.query_tiles = std::max<int64_t>(1, sizes.query_tiles());
    plan.stages = config.stages;
    plan.dependent_launch = true;
    plan.workspace = decode_workspace(plan, config, problem);
    if (problem.batch == 0 || problem.heads_k == 0) return plan;
    plan_append(plan, kernel, problem);
    plan_attention(plan, kernel, sizes);
    return plan;
}

}  // namespace libflash::cuda::sm90
