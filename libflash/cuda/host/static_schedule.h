// Chooses the static schedule of persistent thread blocks (sm90/static_schedule.cuh): under a causal mask, how many heads at the
// end have tiles that are not paired. Host only, no CUDA header.
#pragma once

#include <algorithm>

#include "cuda/host/tile_schedule.h"
#include "problem/attention.h"

namespace libflash::cuda {

// The times of the tiles of a head, in halves of a key tile.
struct QueryTileTimes {
    int64_t rows, keys, right, shift, tile_q, tile_k;

    int64_t tiles() const { return ceil_div(rows, tile_q); }
    int64_t of(int64_t tile) const {
        constexpr int64_t kWorkTileTime = 3;  // between two work tiles
        const int64_t last_row = std::min(rows, (tile + 1) * tile_q) - 1;
        return 2 * ceil_div(std::clamp<int64_t>(last_row + shift + right + 1, 0, keys), tile_k) + kWorkTileTime;
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
    // The time of the launch. Between the places that are compared, times change in one direction.
    int64_t time() const {
        const int64_t last = (tail_tiles() - tail_begin()) % blocks;  // tiles of the last round
        int64_t longest = 0;
        for (const int64_t place : {int64_t{0}, rest() - 1, rest(), last - 1, last, blocks - last - 1, blocks - last, blocks - 1})
            if (place >= 0 && place < blocks) longest = std::max(longest, time_at(place));
        return longest;
    }
};

// Completes a schedule whose groups have one head. Returns the number of thread blocks.
inline int64_t set_static_schedule(ScheduleParams& schedule, const StaticScheduleChoice& choice) {
    schedule.tail_head = static_cast<int32_t>(choice.tail_head);
    const int64_t most_tiles = schedule.paired ? choice.most_tiles() : ceil_div(blocks_of(schedule), choice.blocks);
    schedule.most_tiles = static_cast<int32_t>(most_tiles);
    return choice.blocks;
}

// The same with the best choice for at most `most_blocks` thread blocks.
inline int64_t set_static_schedule(ScheduleParams& schedule, const AttentionProblem& problem, int64_t tile_q, int64_t tile_k,
                                   int64_t most_blocks) {
    const MaskRule& mask = problem.mask_rule;
    const int64_t units = blocks_of(schedule), heads = schedule.heads, rows = problem.q_rows.capacity,
                  keys = problem.k_rows.capacity, shift = mask.shift(rows, keys);
    const QueryTileTimes times{rows, keys, mask.right, shift, tile_q, tile_k};
    const StaticScheduleChoice all_pairs{heads, heads, std::min(units, most_blocks), times};
    // In a window, or where rows see no key, pairs do not all take the time that is assumed here.
    if (!schedule.paired || mask.left < MaskRule::kUnbounded || keys < rows) return set_static_schedule(schedule, all_pairs);
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
