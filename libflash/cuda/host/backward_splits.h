// Which key tiles of backward several thread blocks divide, so that no multiprocessor is idle while others compute. Host only, no
// CUDA header. Times are in query tiles: what a thread block computes in one step of its loop.
#pragma once

#include <algorithm>

#include "cuda/attention/long_sums.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/plans.h"
#include "problem/attention.h"

namespace libflash::cuda {

struct KeyTileTimes {
    int64_t longest = 0;  // of a key tile
    int64_t all = 0;      // of all key tiles
};

// The time of a work tile besides its query tiles, and what a split needs in addition for its sums: less if only the last wave of
// thread blocks writes and reads sums.
constexpr int64_t kWorkTileTime = 2, kSplitTime = 6, kSplitTimeOfLastWave = 3;
// A split of the longest key tile has no fewer query tiles than this. Splits of short key tiles may have none.
constexpr int64_t kFewestTilesOfSplit = 4;
// Limits of the workspace: splits of a key tile, and splits for each thread block.
constexpr int64_t kMostSplits = 16, kMostSplitsOfBlock = 4;

// Of dense sequences exactly; of packed sequences as if all were as long as the longest.
inline KeyTileTimes key_tile_times(const AttentionProblem& problem, const BackwardPlan& plan) {
    const int64_t rows = problem.q_rows.max_length, keys = problem.k_rows.max_length;
    const MaskRule& mask = problem.mask_rule;
    const int64_t shift = mask.top_left ? 0 : keys - rows, tiles = ceil_div(keys, plan.tile_k);
    KeyTileTimes times;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = tile * plan.tile_k, last = std::min(first + plan.tile_k, keys) - 1;
        const int64_t begin = std::max<int64_t>(0, first - shift - mask.right);
        const int64_t end = std::min(rows, last - shift + mask.left + 1);
        if (end <= begin) continue;
        const int64_t time = (ceil_div(end, plan.tile_q) - begin / plan.tile_q) * problem.group_size();
        times.longest = std::max(times.longest, time);
        times.all += time;
    }
    times.all = times.all * plan.key_tiles / std::max<int64_t>(1, tiles);
    return times;
}

// Key tiles that take about equally long fill the thread blocks a whole number of times; the rest is split.
inline BackwardSplits split_rest(int64_t tiles, int64_t blocks, int64_t longest, int64_t most) {
    const int64_t rest = tiles % blocks, waves = tiles / blocks, of_tile = longest + kWorkTileTime;
    if (rest == 0) return {};
    most = std::min(most, kMostSplitsOfBlock * blocks / rest);
    const int64_t of_split = kWorkTileTime + (waves > 0 ? kSplitTimeOfLastWave : kSplitTime);
    BackwardSplits best{tiles - rest, 1};
    int64_t best_time = of_tile - (waves + 1) * of_tile / 128;  // a smaller gain is not worth the workspace
    for (int64_t splits = 2; splits <= most; ++splits) {
        const int64_t time = ceil_div(rest * splits, blocks) * (ceil_div(longest, splits) + of_split);
        if (time < best_time) best.splits = splits, best_time = time;
    }
    return best;
}

// The time of `work` work tiles, the longest first: not less than that of the longest one, than that of the two shortest ones of
// the first blocks + 1, and than an equal division.
inline int64_t launch_time(int64_t work, int64_t blocks, int64_t longest, int64_t all, int64_t fixed) {
    const int64_t two = work > blocks ? 2 * (fixed + ceil_div(longest * (work - blocks), work)) : 0;
    return std::max({longest + fixed, two, ceil_div(all + work * fixed, blocks)});
}

// Key tiles that take different times, the longest first, are all split if one takes longer than its part of the whole.
// dq_contention: additions to dQ limit the kernel. Then a little longer time by this reckoning is shorter in fact, because the
// splits of a key tile add to different rows of dQ.
inline BackwardSplits split_all(int64_t tiles, int64_t blocks, const KeyTileTimes& times, int64_t most, bool dq_contention) {
    constexpr int64_t kSplitsAgainstContention = 4;
    most = std::min(most, kMostSplitsOfBlock * blocks / tiles);
    BackwardSplits best{0, 1};
    int64_t best_time = launch_time(tiles, blocks, times.longest, times.all, kWorkTileTime);
    for (int64_t splits = 2; splits <= most; ++splits) {
        const int64_t time =
            launch_time(tiles * splits, blocks, ceil_div(times.longest, splits), times.all, kWorkTileTime + kSplitTime);
        const bool separates = dq_contention && splits <= kSplitsAgainstContention;
        if (time < best_time + (separates ? best_time / 12 : -best_time / 16))
            best = {0, splits}, best_time = std::min(time, best_time);
    }
    return best;
}

// The splits of a plan whose launches are known. most: the most splits of a key tile.
inline BackwardSplits backward_splits(const AttentionProblem& problem, const BackwardPlan& plan, int64_t blocks, int64_t most) {
    constexpr int64_t kManyWaves = 128;  // then no gain is large enough
    const int64_t tiles = plan.key_tiles;
    if (tiles == 0 || tiles >= kManyWaves * blocks) return {};
    const KeyTileTimes times = key_tile_times(problem, plan);
    most = std::min({most, kMostSplits, times.longest / kFewestTilesOfSplit});
    const bool equal = 8 * times.longest * tiles <= 9 * times.all;
    // Of packed sequences the host does not know which key tiles are in the last wave.
    if (equal && problem.k_rows.packed() && tiles > blocks) return {};
    const BackwardSplits splits =
        equal ? split_rest(tiles, blocks, times.longest, most) : split_all(tiles, blocks, times, most, plan.tile_k == 64);
    return splits.splits > 1 ? splits : BackwardSplits{};
}

}  // namespace libflash::cuda
