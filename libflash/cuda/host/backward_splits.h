// Which key tiles of backward several thread blocks divide, so that no multiprocessor is idle while others compute. Host only, no
// CUDA header. Times are in query tiles: what a thread block computes in one step of its loop.
#pragma once

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "cuda/attention/long_sums.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/plans.h"
#include "problem/attention.h"

namespace libflash::cuda {

// The time of a work tile besides its query tiles, and what a split needs in addition for its sums: less if only the last wave of
// thread blocks writes and reads sums.
constexpr int64_t kWorkTileTime = 2, kSplitTime = 6, kSplitTimeOfLastWave = 3;
// A split of the longest key tile has no fewer query tiles than this; of the last, incomplete wave alone, where few thread blocks
// have splits. Splits of short key tiles may have none.
constexpr int64_t kFewestTilesOfSplit = 4, kFewestTilesOfLastWave = 2;
// Limits of the workspace: splits of a key tile, and splits for each thread block.
constexpr int64_t kMostSplits = 16, kMostSplitsOfBlock = 4;

struct KeyTileTimes {
    std::vector<int64_t> of_head;  // of each key tile of a sequence, for one query head
    int64_t tiles = 0;             // key tiles of all key heads and sequences
    int64_t group = 1;             // query heads that share a key head
    bool whole_heads = false;      // splits divide the query heads, not the query tiles

    // The longest split of a key tile that takes `time` for one query head.
    int64_t of_split(int64_t time, int64_t splits) const {
        return whole_heads ? time * ceil_div(group, splits) : ceil_div(time * group, splits);
    }
    int64_t longest(int64_t splits = 1) const { return of_split(*std::max_element(of_head.begin(), of_head.end()), splits); }
    int64_t all() const {
        return std::accumulate(of_head.begin(), of_head.end(), int64_t{0}) * group * tiles / static_cast<int64_t>(of_head.size());
    }
    bool are_equal() const { return 8 * longest() * tiles <= 9 * all(); }
};

// Of dense sequences exactly; of packed sequences as if all were as long as the longest. There must be key tiles.
inline KeyTileTimes key_tile_times(const AttentionProblem& problem, const BackwardPlan& plan) {
    const int64_t rows = problem.q_rows.max_length, keys = problem.k_rows.max_length;
    const MaskRule& mask = problem.mask_rule;
    const int64_t shift = mask.shift(rows, keys);
    KeyTileTimes times;
    times.tiles = plan.key_tiles, times.group = problem.group_size();
    for (int64_t first = 0; first < keys; first += plan.tile_k) {
        const int64_t last = std::min(first + plan.tile_k, keys) - 1;
        const int64_t begin = std::max<int64_t>(0, first - shift - mask.right);
        const int64_t end = std::min(rows, last - shift + mask.left + 1);
        times.of_head.push_back(end <= begin ? 0 : ceil_div(end, plan.tile_q) - begin / plan.tile_q);
    }
    return times;
}

// Key tiles that take about equally long fill the thread blocks a whole number of times; the rest is split.
inline BackwardSplits split_rest(const KeyTileTimes& times, int64_t blocks, int64_t most) {
    const int64_t rest = times.tiles % blocks, waves = times.tiles / blocks, of_tile = times.longest() + kWorkTileTime;
    if (rest == 0) return {};
    most = std::min(most, kMostSplitsOfBlock * blocks / rest);
    const int64_t of_split = kWorkTileTime + (waves > 0 ? kSplitTimeOfLastWave : kSplitTime);
    BackwardSplits best{times.tiles - rest, 1};
    int64_t best_time = of_tile - (waves + 1) * of_tile / 128;  // a smaller gain is not worth the workspace
    for (int64_t splits = 2; splits <= most; ++splits) {
        const int64_t time = ceil_div(rest * splits, blocks) * (times.longest(splits) + of_split);
        if (time < best_time) best.splits = splits, best_time = time;
    }
    return best;
}

// The time of a launch: each of `blocks` thread blocks takes the next work tile when it has finished one.
class SimulatedLaunch {
public:
    explicit SimulatedLaunch(int64_t blocks) : blocks_at_{{0, blocks}} {}
    void take(int64_t work_tiles, int64_t time) {
        while (work_tiles > 0) {
            const auto first = blocks_at_.begin();
            const int64_t taken = std::min(work_tiles, first->second);
            blocks_at_[first->first + time] += taken;
            first->second -= taken;
            work_tiles -= taken;
            if (first->second == 0) blocks_at_.erase(first);
        }
    }
    int64_t time() const { return blocks_at_.rbegin()->first; }

private:
    std::map<int64_t, int64_t> blocks_at_;  // the number of thread blocks by the time at which they finish their work tile
};

// The time of a launch whose key tiles have so many splits, each `fixed` longer than its query tiles.
inline int64_t launch_time(const KeyTileTimes& times, int64_t splits, int64_t blocks, int64_t fixed) {
    SimulatedLaunch launch(blocks);
    const auto of_head = static_cast<int64_t>(times.of_head.size());
    const int64_t larger = times.whole_heads ? times.group % splits : 0;  // splits that have one query head more than the others
    for (int64_t i = 0; i < of_head; ++i) {
        const int64_t time = times.of_head[static_cast<size_t>(i)];
        const int64_t tiles = (i + 1) * times.tiles / of_head - i * times.tiles / of_head;
        launch.take(tiles * larger, times.of_split(time, splits) + fixed);
        launch.take(tiles * (splits - larger),
                    (larger > 0 ? time * (times.group / splits) : times.of_split(time, splits)) + fixed);
    }
    return launch.time();
}

// Key tiles that take different times, the longest first, are all split if one takes longer than its part of the whole.
// dq_contention: additions to dQ limit the kernel. Then splits are also chosen if this model gives a little longer time: the
// splits of a key tile add to different rows of dQ, which the model does not consider.
inline BackwardSplits split_all(const KeyTileTimes& times, int64_t blocks, int64_t most, bool dq_contention) {
    constexpr int64_t kSplitsAgainstContention = 4;
    most = std::min(most, kMostSplitsOfBlock * blocks / times.tiles);
    BackwardSplits best{0, 1};
    if (most < 2) return best;
    int64_t best_time = launch_time(times, 1, blocks, kWorkTileTime);
    for (int64_t splits = 2; splits <= most; ++splits) {
        const int64_t of_split = kWorkTileTime + kSplitTime;
        const bool separates = dq_contention && splits <= kSplitsAgainstContention;
        const int64_t limit = best_time + (separates ? best_time / 12 : -best_time / 16);
        if (times.longest(splits) + of_split >= limit) continue;  // without a simulation
        const int64_t time = launch_time(times, splits, blocks, of_split);
        if (time < limit) best = {0, splits}, best_time = std::min(time, best_time);
    }
    return best;
}

// Whether two splits of each key tile are worth their workspace because fewer key heads are then computed at a time
// (balance_key_tiles()): many query heads share a key head, and those of all key heads at a time read and add to far more than
// the L2 cache holds. Under a causal mask the key tiles of a key head take different times for a query head, so the thread blocks
// that compute them are soon at different query heads. The sums of the splits may have half of the bytes of the dQ accumulator.
// Of packed sequences the host does not know the lengths.
inline bool splits_for_cache(const AttentionProblem& problem, const BackwardPlan& plan, const KeyTileTimes& times,
                             int64_t blocks) {
    constexpr int64_t kManyHeads = 8;
    if (problem.group_size() < kManyHeads || problem.q_rows.packed() || problem.k_rows.packed()) return false;
    const int64_t heads_k = problem.heads_k * problem.batch;
    const int64_t at_once = std::min(heads_k, ceil_div(blocks * heads_k, plan.key_tiles)) * problem.group_size();
    const int64_t row_bytes = query_row_bytes(problem, problem.head_dim);
    const auto bytes = static_cast<double>(at_once * times.longest() / problem.group_size() * plan.tile_q * row_bytes);
    const int64_t rows_of_sums = 2 * 2 * plan.key_tiles * plan.tile_k,
                  rows_of_dq = problem.heads_q * problem.batch * problem.q_rows.max_length;
    return at_once > problem.group_size() && bytes > 5 * kL2Bytes && 2 * rows_of_sums <= rows_of_dq;
}

// The splits of a plan whose launches are known. whole_heads: splits divide the query heads.
inline BackwardSplits backward_splits(const AttentionProblem& problem, const BackwardPlan& plan, int64_t blocks,
                                      bool whole_heads) {
    constexpr int64_t kManyWaves = 128;  // then no gain is large enough
    const int64_t tiles = plan.key_tiles, group = problem.group_size();
    int64_t most = std::min(kMostSplits, ceil_div(problem.q_rows.max_length, plan.tile_q) * group / kFewestTilesOfLastWave);
    if (whole_heads) most = std::min(most, group);
    if (tiles == 0 || problem.k_rows.max_length == 0 || tiles >= kManyWaves * blocks || most < 2) return {};
    KeyTileTimes times = key_tile_times(problem, plan);
    times.whole_heads = whole_heads;
    const bool equal = times.are_equal();
    most = std::min(most, times.longest() / (equal && tiles > blocks ? kFewestTilesOfLastWave : kFewestTilesOfSplit));
    // Of packed sequences the host does not know which key tiles are in the last wave.
    if (equal && problem.k_rows.packed() && tiles > blocks) return {};
    BackwardSplits splits = equal ? split_rest(times, blocks, most) : split_all(times, blocks, most, plan.tile_k == 64);
    if (!equal && splits.splits == 1 && splits_for_cache(problem, plan, times, blocks)) splits = {0, 2};
    if (splits.splits == 1) return {};
    splits.counters = (tiles - splits.first) * split_counters(plan.tile_k);
    return splits;
}

}  // namespace libflash::cuda
