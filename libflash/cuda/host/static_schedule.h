// Chooses the static schedule of persistent thread blocks (sm90/static_schedule.cuh): under a causal mask, how many heads at the
// end have tiles that are not paired, and in which order these are. Host only, no CUDA header.
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
    bool in_window() const { return mask.left < MaskRule::kUnbounded; }
    int64_t of(int64_t tile) const {
        constexpr int64_t kWorkTileTime = 150;  // between two work tiles
        const int64_t last_row = std::min(rows, (tile + 1) * tile_q) - 1;
        const int64_t visible = std::clamp<int64_t>(mask.last(last_row, mask.shift(rows, keys)), 0, keys);
        return of_key_tile * ceil_div(std::min(visible, mask.left + mask.right + tile_q), tile_k) + kWorkTileTime;
    }
};

// A static schedule under a causal mask, and its time. The names are those of StaticScheduleParams.
class StaticScheduleChoice {
public:
    // heads_of_round: heads of the tail in each of its rounds; 0: the tiles of all heads of the tail are in one order. A time
    // above `limit` may be too short.
    StaticScheduleChoice(const QueryTileTimes& tile_times, int64_t all_heads, int64_t first_of_tail, int64_t thread_blocks,
                         int64_t heads_of_round = 0, int64_t limit = INT64_MAX)
        : heads(all_heads), tail_head(first_of_tail), blocks(thread_blocks), times_(&tile_times), tiles_(tile_times.tiles()),
          alike_(heads_of_round > 0 ? (heads - tail_head) / heads_of_round / 2 : 0) {
        pairs = tail_head * ceil_div(tiles_, 2), pair_rounds = ceil_div(pairs, blocks), rest_ = pairs % blocks;
        tail_tiles = (heads - tail_head) * tiles_;
        tail_group = heads_of_round > 0 ? heads_of_round : std::max<int64_t>(1, heads - tail_head);
        if (heads_of_round == 0 && rest_ > 0) tail_begin = blocks - rest_;
        tail_round = heads_of_round > 0 ? heads_of_round * tiles_ : blocks;
        tail_rounds = ceil_div(std::max<int64_t>(0, tail_tiles - tail_begin), tail_round);
        of_pair_ = times_->of(0) + times_->of(tiles_ - 1);
        if (times_->in_window() && pairs > 0) set_times_in_window();
        time = longest_time(limit);
    }

    int64_t heads, tail_head, blocks, pairs, pair_rounds, tail_tiles, tail_group, tail_begin = 0, tail_round, tail_rounds;
    int64_t time;  // of the launch

    int64_t tiles() const { return tiles_; }  // of a head

private:
    // The longest time at the ends of the rounds and at some places between them, which is less than the longest of all by a few
    // percent at most. Ends early with a longer time than `limit`.
    int64_t longest_time(int64_t limit) const {
        constexpr int64_t kBetween = 12;
        const int64_t round = tail_round, last = (tail_tiles - tail_begin) % round;  // tiles of the last round
        int64_t longest = 0;
        for (const int64_t place : {int64_t{0}, rest_ - 1, rest_, last - 1, last, round - last - 1, round - last, round - 1})
            if (place >= 0 && place < blocks && longest <= limit) longest = std::max(longest, time_at(place));
        for (int64_t i = 1; i < kBetween && longest <= limit; ++i) longest = std::max(longest, time_at(i * blocks / kBetween));
        return longest;
    }
    // In a window pairs take different times, which the rotation of the rounds spreads over the thread blocks: a round takes the
    // mean time, and the last one that of the longest pair.
    void set_times_in_window() {
        int64_t all = 0, longest = 0;
        for (int64_t tile = 0; tile < tiles_; ++tile) {
            all += times_->of(tile);
            longest = std::max(longest, times_->of(tile) + (2 * tile + 1 == tiles_ ? 0 : times_->of(tiles_ - 1 - tile)));
        }
        of_pair_ = ceil_div(all, ceil_div(tiles_, 2)), over_mean_ = longest - of_pair_;
    }
    // The time of the thread blocks at a place in the round.
    int64_t time_at(int64_t place) const {
        int64_t time = over_mean_ + of_complete_rounds(pair_rounds - (rest_ > 0));
        if (place < rest_) time += of_pair_;
        if (place >= rest_ && place - rest_ < tail_begin) time += of_tail(place - rest_);
        if (alike_ > 0) time += alike_ * (of_round(0, place) + of_round(1, place));
        for (int64_t round = 2 * alike_; round < tail_rounds; ++round) time += of_round(round, place);
        return time;
    }
    // With an odd number of tiles one tile of each head is alone. The rounds are rotated, so every thread block has some of them.
    int64_t of_complete_rounds(int64_t rounds) const {
        if (rounds == 0 || tiles_ % 2 == 0 || times_->in_window()) return rounds * of_pair_;
        return rounds * of_pair_ - (rounds - 1) * (of_pair_ - times_->of(tiles_ / 2)) / ceil_div(tiles_, 2);
    }
    // Of tile `number` of the tail; 0 beyond its end.
    int64_t of_tail(int64_t number) const {
        if (number >= tail_tiles) return 0;
        const int64_t of_group = tail_group * tiles_, group = number < of_group ? 0 : number / of_group;
        const int64_t heads_here = std::min(tail_group, heads - tail_head - group * tail_group);
        return times_->of(tiles_ - 1 - (number - group * of_group) / heads_here);
    }
    int64_t of_round(int64_t round, int64_t place) const {
        const int64_t in_round = round % 2 == 0 ? tail_round - 1 - place : place;
        if (in_round < 0 || in_round >= tail_round) return 0;
        return of_tail(tail_begin + round * tail_round + in_round);
    }

    const QueryTileTimes* times_;
    int64_t tiles_, alike_;  // alike_: how many times two complete rounds of heads follow each other
    int64_t rest_;           // pairs of the last round, if it is incomplete
    int64_t of_pair_, over_mean_ = 0;
};

inline QueryTileTimes query_tile_times(const AttentionProblem& problem, int64_t tile_q, int64_t tile_k) {
    return {problem.q_rows.capacity, problem.k_rows.capacity, problem.mask_rule, tile_q, tile_k};
}

// What a static schedule needs and how long it takes.
struct StaticLaunch {
    int64_t blocks, time;
};

// Completes a schedule without pairs, for `blocks` thread blocks.
inline StaticLaunch set_static_rounds(ScheduleParams& schedule, const QueryTileTimes& times, int64_t blocks) {
    const int64_t rounds = ceil_div(blocks_of(schedule), blocks);
    schedule.fixed.most_tiles = static_cast<int32_t>(rounds);
    schedule.fixed.units = static_cast<int32_t>(blocks_of(schedule));
    return {blocks, rounds * times.of(times.tiles() - 1)};
}
// Completes a schedule of pairs, whose groups have one head, as chosen.
inline StaticLaunch set_static_schedule(ScheduleParams& schedule, const StaticScheduleChoice& choice) {
    const auto count = [](int64_t n) { return static_cast<int32_t>(n); };
    StaticScheduleParams& fixed = schedule.fixed;
    fixed.most_tiles = count(2 * choice.pair_rounds + choice.tail_rounds);
    fixed.units = count(choice.pairs), fixed.pair_rounds = count(choice.pair_rounds);
    fixed.tiles_of_head = count(choice.tiles());
    fixed.tail_head = count(choice.tail_head), fixed.tail_heads = count(choice.heads - choice.tail_head);
    fixed.tail_tiles = count(choice.tail_tiles);
    fixed.tail_begin = count(choice.tail_begin), fixed.tail_round = count(choice.tail_round);
    fixed.tail_group = divisor_params(choice.tail_group);
    fixed.tail_group_tiles = divisor_params(choice.tail_group * choice.tiles());
    return {choice.blocks, choice.time};
}

// By how much a launch takes longer because the tiles of a head run at different times, so that `bytes` bytes of keys and values
// are in use at once: what exceeds the L2 cache is read again. TUNING.md has the measurements.
inline double cache_factor(double bytes) { return 1.0 + 0.1 * std::max(0.0, bytes / (1.5 * kL2Bytes) - 1.0); }

// The best choice for at most `most_blocks` thread blocks under a causal mask without a window. `head_bytes`: keys and values of
// a head.
inline StaticScheduleChoice best_static_schedule(int64_t heads, const QueryTileTimes& times, int64_t most_blocks,
                                                 double head_bytes) {
    const int64_t tiles = times.tiles(), pairs = ceil_div(tiles, 2), rounds = ceil_div(heads * pairs, most_blocks);
    const int64_t blocks = std::min(heads * tiles, most_blocks), heads_in_pairs = std::min(heads, ceil_div(most_blocks, pairs));
    if (tiles == 1) return {times, heads, 0, blocks};
    StaticScheduleChoice best{times, heads, heads, std::min(heads * pairs, most_blocks)};
    // 0.996: a smaller gain is not worth more heads in the L2 cache.
    double best_time = static_cast<double>(best.time) * cache_factor(head_bytes * static_cast<double>(heads_in_pairs)) * 0.996;
    const auto consider = [&](int64_t first_of_tail, int64_t heads_of_round, double factor) {
        const auto limit = static_cast<int64_t>(best_time / factor);
        const StaticScheduleChoice choice{times, heads, first_of_tail, blocks, heads_of_round, limit};
        const double time = static_cast<double>(choice.time) * factor;
        if (time < best_time) best = choice, best_time = time;
    };
    for (const int64_t tail_rounds : {1, 2, 3, 4, 6}) {
        // The longest tiles of all heads of the tail are computed at the same time.
        const int64_t first = std::max<int64_t>(0, rounds - tail_rounds) * most_blocks / pairs;
        const int64_t at_once = std::max(std::min(first, heads_in_pairs), heads - first);
        consider(first, 0, cache_factor(head_bytes * static_cast<double>(at_once)));
        if (first == 0) break;
    }
    const int64_t heads_of_round = std::min(heads, most_blocks / tiles);
    if (heads_of_round > 0) consider(0, heads_of_round, 1.03);  // for the error of these times
    return best;
}

// The best choice in a window: pairs, or all tiles in one order. Only the first tiles of a head see fewer keys than the window
// has, so a pair may be as long as two of the longest tiles. Rows that are computed at the same time have nearly the same keys.
inline StaticScheduleChoice best_schedule_in_window(int64_t heads, const QueryTileTimes& times, int64_t most_blocks) {
    constexpr int64_t kManyRounds = 32;  // then all choices take nearly the same time
    const int64_t tiles = heads * times.tiles();
    const StaticScheduleChoice pairs{times, heads, heads, std::min(heads * ceil_div(times.tiles(), 2), most_blocks)};
    if (times.tiles() == 1 || tiles > kManyRounds * most_blocks) return pairs;
    const StaticScheduleChoice alone{times, heads, 0, std::min(tiles, most_blocks)};
    return alone.time < pairs.time ? alone : pairs;
}

// Completes a schedule for at most `most_blocks` thread blocks; a schedule of pairs with the best choice.
inline StaticLaunch set_static_schedule(ScheduleParams& schedule, const AttentionProblem& problem, const QueryTileTimes& times,
                                        int64_t most_blocks) {
    const int64_t units = blocks_of(schedule), heads = schedule.heads;
    if (!schedule.paired) return set_static_rounds(schedule, times, std::min(units, most_blocks));
    if (times.keys < times.rows)  // rows see no key, and pairs do not all take the time that is assumed here
        return set_static_schedule(schedule, StaticScheduleChoice{times, heads, heads, std::min(units, most_blocks)});
    if (times.in_window()) return set_static_schedule(schedule, best_schedule_in_window(heads, times, most_blocks));
    return set_static_schedule(schedule, best_static_schedule(heads, times, most_blocks, key_bytes(problem)));
}

}  // namespace libflash::cuda
