// The parts of plans that concern long sums (attention/long_sums.h). Host only, no CUDA header.
#pragma once

#include <algorithm>

#include "cuda/attention/long_sums.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/plans.h"
#include "problem/attention.h"

namespace libflash::cuda {

// The long sums of all thread blocks could need far more memory than the output. So at most this many thread blocks per
// multiprocessor are launched at once. These are several waves, because multiprocessors are idle at the end of each launch.
constexpr int64_t kBlocksAtOnce = 16;

// An upper bound of the keys that a tile of tile_q query rows sees.
inline int64_t longest_sum(const AttentionProblem& problem, int tile_q) {
    const int64_t keys = problem.k_rows.max_length;
    const MaskRule& rule = problem.mask_rule;
    if (problem.has_positions) return keys;  // rows that are neighbours in the tensor may be far apart
    if (rule.left >= keys || rule.right >= keys) return keys;
    return std::min(keys, rule.left + rule.right + tile_q);
}

// Adds the workspace of long sums to a plan that needs them. Called when the tiles and the launch of the plan are known.
inline void plan_long_sums(ForwardPlan& plan, const KernelConfig& config, const AttentionProblem& problem) {
    plan.long_sums = needs_long_sums(config, longest_sum(problem, plan.tile_q));
    if (!plan.long_sums) return;
    const int64_t blocks = plan.blocks_at_once > 0 ? std::min(plan.attention.blocks, plan.blocks_at_once) : plan.attention.blocks;
    plan.workspace.add("long_sums", static_cast<size_t>(blocks) * long_sums_bytes(plan.tile_q, config.head_dim_v));
}

// An upper bound of the query rows of a head that see a tile of tile_k keys.
inline int64_t longest_gradient_sum(const AttentionProblem& problem, int tile_k) {
    const int64_t rows = problem.q_rows.max_length;
    const MaskRule& rule = problem.mask_rule;
    if (problem.has_positions) return rows;
    if (rule.left >= rows || rule.right >= rows) return rows;
    return std::min(rows, rule.left + rule.right + tile_k);
}

// The launches of the dK/dV kernel for sequences of up to `length` queries, of which a key tile sees up to `rows`, and for
// key heads that `group` query heads share. Does not set `key_tiles`.
inline BackwardParts backward_parts(const KernelConfig& config, int64_t length, int64_t rows, int64_t group) {
    const int64_t most = most_rows_of_accumulators(config);
    BackwardParts parts;
    if (rows * group <= most) return parts;
    parts.heads = std::max<int64_t>(1, std::min(group, most / rows));
    if (rows > most) {
        parts.rows = std::max<int64_t>(1, most / kUnitRows) * kUnitRows;
        parts.of_rows = ceil_div(length, parts.rows);
    }
    parts.launches = ceil_div(group, parts.heads) * parts.of_rows;
    return parts;
}

// Adds the launches of the dK/dV kernel and their workspace. Called when the tiles and thread blocks of the plan are known.
inline void plan_gradient_sums(BackwardPlan& plan, const KernelConfig& config, const AttentionProblem& problem,
                               int multiprocessors) {
    if (plan.dk_dv.blocks == 0) return;
    plan.parts =
        backward_parts(config, problem.q_rows.max_length, longest_gradient_sum(problem, plan.tile_k), problem.group_size());
    if (plan.parts.launches == 1) return;
    plan.parts.key_tiles = std::min(plan.key_tiles, kBlocksAtOnce * multiprocessors);
    plan.workspace.add("gradient_sums",
                       static_cast<size_t>(plan.parts.key_tiles) * gradient_sums_bytes(plan.tile_k, config.head_dim));
}

}  // namespace libflash::cuda
