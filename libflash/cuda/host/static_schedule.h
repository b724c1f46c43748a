// Chooses the static schedule of persistent thread blocks (sm90/static_schedule.cuh): under a causal mask, how many heads at the
// end have tiles that are not paired. Host only, no CUDA header.
#pragma once

#include <algorithm>

#include "cuda/host/tile_schedule.h"
#include "problem/attention.h"

namespace libflash::cuda {

// The times of the tiles of a head. A key tile takes 100 by default.
struct QueryTileTimes {
    int64_t rows, keys;
    MaskRule mask;
    int64_t tile_q, tile_k, of_key_tile = 100;

    int64_t tiles() const { return ceil_div(rows, tile_q); }
    int64_t of(int64_t tile) const {
        constexpr int64_t kWorkTileTime = 150;  // between two work tiles
        const int64_t last_row = std::min(rows, (tile + 1) * tile_q) - 1;
        const int64_t visible = std::clamp<int64_t>(mask.last(last_row, mask.shift(rows, keys)), 0, keys);
        return of_key_tile * ceil_div(std::min(visible, mask.left + mask.right + tile_q), tile_k) + kWorkTileTime;
    }
};

struct StaticScheduleChoice {
    int64_t heads, tail_head, blocks;
    const QueryTileTimes& times;

    int64_t pairs() const { return tail_head * ceil_div(times.tiles(), 2); }
    int64_t rest() const { return pairs() % blocks; }  // pairs of the last round, if it is incomplete
    int64_t tail_tiles() const { return (heads - tail_head) * times.tiles(); }
    int64_t tail_begin() const { return rest() > 0 ? blocks - rest() : 0; }  // tiles of the tail in that round
    int64_t tail_rounds() const { return ceil_div(std::max<int64_t>(0, tail_tiles() - tail_begin()), blocks); }
    int64_t most_tiles() const { return 2 * ceil_div(pairs(), blocks) + tail_rounds(); }

    // The time of the thread blocks at a place in the round.
    int64_t time_at(int64_t place) const {
        const auto of_tail = [&](int64_t number) {
            return number < tail_tiles() ? times.of(times.tiles() - 1 - number / (heads - tail_head)) : 0;
        };
        const int64_t pair = times.of(0) + times.of(times.tiles() - 1);
        int64_t time = pairs() / blocks * pair;
        if (rest() > 0) time += place < rest() ? pair : of_tail(place - rest());
        for (int64_t round = 0; round < tail_rounds(); ++round)
            time += of_tail(tail_begin() + round * blocks + (round % 2 == 0 ? blocks - 1 - place : place));
        return time;
    }
    // The time of the launch: the longest at the ends of the rounds and at some places between them, which is less than the
    // longest of all by a few percent at most.
    int64_t time() const {
        constexpr int64_t kBetween = 12;
        const int64_t last = (tail_tiles() - tail_begin()) % blocks;  // tiles of the last round
        int64_t longest = 0;
        for (const int64_t place : {int64_t{0}, rest() - 1, rest(), last - 1, last, blocks - last - 1, blocks - last, blocks - 1})
            if (place >= 0 && place < blocks) longest = std::max(longest, time_at(place));
        for (int64_t i = 1; i < kBetween; ++i) longest = std::max(longest, time_at(i * blocks / kBetween));
        return longest;
    }
};

inline QueryTileTimes query_tile_times(const AttentionProblem& problem, int64_t tile_q, int64_t tile_k) {
    return {problem.q_rows.capacity, problem.k_rows.capacity, problem.mask_rule, tile_q, tile_k};
}

// What a static schedule needs and how long it takes.
struct StaticLaunch {
    int64_t blocks, time;
};

// Completes a schedule whose groups have one head.
inline StaticLaunch set_static_schedule(ScheduleParams& schedule, const StaticScheduleChoice& choice) {
    const int64_t rounds = ceil_div(blocks_of(schedule), choice.blocks);
    const auto count = [](int64_t n) { return static_cast<int32_t>(n); };
    StaticScheduleParams& fixed = schedule.fixed;
    fixed.most_tiles = count(rounds);
    if (!schedule.paired) return {choice.blocks, rounds * choice.times.of(choice.times.tiles() - 1)};
    fixed.most_tiles = count(choice.most_tiles());
    fixed.pairs = count(choice.pairs()), fixed.pair_rounds = count(ceil_div(choice.pairs(), choice.blocks));
    fixed.tail_head = count(choice.tail_head), fixed.tail_tiles = count(choice.tail_tiles());
    fixed.tail_begin = count(choice.tail_begin());
    fixed.tail_heads = divisor_params(std::max<int64_t>(1, choice.heads - choice.tail_head));
    fixed.tiles_of_head = count(choice.times.tiles());
    return {choice.blocks, choice.time()};
}

// The same with the best choice for at most `most_blocks` thread blocks.
inline StaticLaunch set_static_schedule(ScheduleParams& schedule, const AttentionProblem& problem, const QueryTileTimes& times,
                                        int64_t most_blocks) {
    const int64_t units = blocks_of(schedule), heads = schedule.heads;
    const StaticScheduleChoice all_pairs{heads, heads, std::min(units, most_blocks), times};
    // In a window, or where rows see no key, pairs do not all take the time that is assumed here.
    if (!schedule.paired || problem.mask_rule.left < MaskRule::kUnbounded || times.keys < times.rows)
        return set_static_schedule(schedule, all_pairs);
    // The keys and values of the tail should fit the L2 cache, because its longest tiles are computed at the same time.
    const auto most_heads = static_cast<int64_t>(1.5 * kL2Bytes / std::max(1.0, key_bytes(problem)));
    int64_t tail_head = heads, time = all_pairs.time() * 255 / 256;  // a smaller gain is not worth more heads in the L2 cache
    const int64_t rounds = ceil_div(units, most_blocks), blocks = std::min(heads * times.tiles(), most_blocks);
    for (const int64_t tail_rounds : {2, 3, 4, 6}) {
        const int64_t first = std::max<int64_t>(0, rounds - tail_rounds) * most_blocks / schedule.tiles;
        if (heads - first > most_heads) break;
        const int64_t with_tail = StaticScheduleChoice{heads, first, blocks, times}.time();
        if (with_tail < time) tail_head = first, time = with_tail;
    }
    if (tail_head == heads) return set_static_schedule(schedule, all_pairs);
    return set_static_schedule(schedule, {heads, tail_head, blocks, times});
}

}  // namespace libflash::cuda
