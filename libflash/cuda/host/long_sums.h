// The part of a forward plan that concerns long sums (attention/long_sums.h). Host only, no CUDA header.
#pragma once

#include <algorithm>

#include "cuda/attention/long_sums.h"
#include "cuda/plans.h"
#include "problem/attention.h"

namespace libflash::cuda {

// An upper bound of the keys that a tile of tile_q query rows sees.
inline int64_t longest_sum(const AttentionProblem& problem, int tile_q) {
    const int64_t keys = problem.k_rows.max_length;
    const MaskRule& rule = problem.mask_rule;
    if (rule.left >= keys || rule.right >= keys) return keys;
    return std::min(keys, rule.left + rule.right + tile_q);
}

// Adds the workspace of long sums to a plan that needs them, when its tiles and its launch are known.
inline void plan_long_sums(ForwardPlan& plan, const KernelConfig& config, const AttentionProblem& problem) {
    plan.long_sums = needs_long_sums(config, longest_sum(problem, plan.tile_q));
    if (!plan.long_sums) return;
    const int64_t blocks = plan.blocks_at_once > 0 ? std::min(plan.attention.blocks, plan.blocks_at_once) : plan.attention.blocks;
    plan.workspace.add("long_sums", static_cast<size_t>(blocks) * long_sums_bytes(plan.tile_q, config.head_dim_v));
}

}  // namespace libflash::cuda
