// Makes the tile schedule of a problem. Host only, no CUDA header.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/attention/l2_cache.h"
#include "cuda/attention/params.h"
#include "problem/attention.h"

namespace libflash::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// For 1 <= divisor < 2^31. With 2^shift >= divisor, 2^(31 + shift) / divisor rounded up is an exact multiplier for 31-bit
// dividends.
inline Divisor divisor_params(int64_t divisor) {
    uint32_t shift = 0;
    while ((int64_t{1} << shift) < divisor) ++shift;
    if (shift == 0) return {1, 0, 0};
    const int64_t multiplier = ceil_div(int64_t{1} << (31 + shift), divisor);
    return {static_cast<uint32_t>(divisor), static_cast<uint32_t>(multiplier), shift - 1};
}

// Heads per group: as many as fit, or a slightly smaller divisor of all heads, so that groups are equal. A small last group
// would start its longest tiles when everything else has finished.
inline int64_t group_of_heads(int64_t all, double head_bytes) {
    const int64_t fit = std::max<int64_t>(1, std::min(all, static_cast<int64_t>(kL2Bytes / std::max(1.0, head_bytes))));
    for (int64_t group = fit; 2 * group >= fit && fit - group < 64; --group) {
        if (all % group == 0) return group;
    }
    return fit;
}

// Heads per group where the tiles of a head become shorter and shorter, as under a causal mask, and each of `blocks` thread
// blocks that run at the same time takes the next tile when it has finished one. 0: any group is balanced. Two cases:
// - The tiles of a group fill the thread blocks once. A thread block that has had a short tile takes a long one of the next
//   group, so the work of every two groups is divided equally. Few heads at a time are best for the L2 cache.
// - Otherwise a group has two tiles or more for each thread block, or all heads.
inline int64_t group_for_balance(int64_t all, int64_t tiles, int64_t blocks) {
    constexpr int64_t kManyGroups = 9;  // then it does not matter that no group follows the last one
    if (all == 0 || tiles == 0) return 0;
    if (tiles >= blocks) return all * tiles < 6 * blocks ? all : 0;
    const int64_t wave = blocks / tiles, groups = all / wave;
    const bool fills = 10 * wave * tiles >= 9 * blocks;
    if (fills && wave <= all && all % wave == 0 && (groups % 2 == 0 || groups >= kManyGroups)) return wave;
    const int64_t large = std::min(all, ceil_div(2 * blocks, tiles));
    return ceil_div(all, all / large);
}

inline void set_group(ScheduleParams& params, int64_t heads) {
    params.heads_per_group = static_cast<int32_t>(heads);
    params.group_tiles = divisor_params(std::max<int64_t>(1, heads * params.tiles));
    params.group = divisor_params(heads);
}

// The schedule for tiles of `tile` rows of one side (queries or keys), with `heads` heads per sequence. A head reads `head_bytes`
// bytes of the other side. `reversed`: the last tiles come first.
inline ScheduleParams schedule_params(const Sequences& rows, int64_t batch, int64_t heads, int64_t tile, double head_bytes,
                                      bool reversed) {
    ScheduleParams params{};
    // Packed: a bound that only sequences which overlap can exceed (attention/query_units.cuh).
    const int64_t tiles = rows.packed() ? std::min(rows.capacity / tile + batch, batch * ceil_div(rows.max_length, tile))
                                        : ceil_div(rows.capacity, tile);
    const int64_t all = rows.packed() ? heads : batch * heads;
    const int64_t group = all > 0 ? group_of_heads(all, head_bytes) : 1;
    params.tiles = static_cast<int32_t>(tiles);
    params.heads = static_cast<int32_t>(all);
    set_group(params, group);
    params.sequence = divisor_params(std::max<int64_t>(1, heads));
    params.reversed = reversed;
    return params;
}

// Changes the groups of a schedule of key tiles under a causal mask, where groups that suit the L2 cache alone would leave thread
// blocks idle at the end. `blocks` thread blocks run at the same time. splits: work tiles of each key tile.
inline void balance_key_tiles(ScheduleParams& schedule, const AttentionProblem& problem, int64_t blocks, int64_t splits = 1) {
    const MaskRule& mask = problem.mask_rule;
    if (mask.right == MaskRule::kUnbounded || mask.left < MaskRule::kUnbounded || problem.k_rows.packed()) return;
    const int64_t group = group_for_balance(schedule.heads, schedule.tiles * splits, blocks);
    if (group > 0) set_group(schedule, group);
}

inline int64_t blocks_of(const ScheduleParams& schedule) { return int64_t{schedule.heads} * schedule.tiles; }

// Bytes of a query row that a key tile reads and adds to in backward: Q, dO and, with `head_dim` floats, the dQ accumulator.
inline int64_t query_row_bytes(const AttentionProblem& problem, int64_t head_dim) {
    return element_bytes(problem.dtype) * (problem.head_dim + problem.head_dim_v) + 4 * head_dim;
}

// Bytes of keys and values that a query head reads, divided by the number of query heads that share them.
inline double key_bytes(const AttentionProblem& problem) {
    const int64_t row_bytes = element_bytes(problem.dtype) * (problem.head_dim + problem.head_dim_v);
    return static_cast<double>(problem.k_rows.max_length) * static_cast<double>(row_bytes) /
           static_cast<double>(problem.group_size());
}

}  // namespace libflash::cuda
