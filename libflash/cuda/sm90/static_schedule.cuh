// The static schedule of the persistent thread blocks of sm_90a: each takes one unit in a round. A unit is a tile of query rows
// or, under a causal mask, a pair of a late tile and an early tile of a head, because all pairs take about the same time. The
// last round of pairs may be incomplete, which would leave thread blocks idle for the time of a pair. Therefore the tiles of the
// last heads, the tail, are not paired: they follow in rounds of one tile, the longest first, every second round in reverse
// order. Either the tiles of all these heads are in one order, or each round has the tiles of a few heads: those share keys and
// values in the L2 cache (host/static_schedule.h chooses).
#pragma once

#include "cuda/attention/schedule.cuh"

namespace libflash::cuda::sm90 {

template <int kBlockM, bool kMayBePacked>
struct StaticSchedule {
    const ScheduleParams& schedule;
    const LengthsParams& rows;
    int batch;

    // Work tile `index` < schedule.fixed.most_tiles of this thread block; batch < 0: none.
    __device__ __forceinline__ TileCoordinates tile(int index) const {
        if (schedule.paired) return tile_of_pairs(index);
        const int number = number_in_round(index);
        if (number >= schedule.fixed.units) return {-1, 0, 0};
        return tile_coordinates<kBlockM, kMayBePacked>(schedule, rows, batch, number);
    }

private:
    // The unit of this thread block in a round. The units of a round are rotated by one thread block from round to round:
    // otherwise a thread block could get the same tile of every head, which may be longer or shorter than the rest.
    __device__ __forceinline__ static int number_in_round(int round) {
        const int blocks = static_cast<int>(gridDim.x);
        return round * blocks + (static_cast<int>(blockIdx.x) + round) % blocks;
    }
    __device__ __forceinline__ TileCoordinates tile_of_pairs(int index) const {
        const StaticScheduleParams& fixed = schedule.fixed;
        const int odd = index % 2;
        if (index >= 2 * fixed.pair_rounds) return tile_of_tail(number_in_tail(index - 2 * fixed.pair_rounds));
        const int number = number_in_round(index / 2);
        // A thread block that has no pair in the last round of pairs may take one tile of the tail instead.
        if (number >= fixed.units) {
            const int of_tail = number - fixed.units;
            return tile_of_tail(odd || of_tail >= fixed.tail_begin ? fixed.tail_tiles : of_tail);
        }
        const int head = divide(number, schedule.group_tiles), near = number - head * schedule.tiles;  // a group has one head
        const int far = fixed.tiles_of_head - 1 - near;
        if (odd && near == far) return {-1, 0, 0};
        return tile_of_head(schedule, head, odd ? near : far);
    }
    // In the rounds of the tail a thread block has the same place as in the last round of pairs; in every second round, beginning
    // with the first, places count from the other end. Returns fixed.tail_tiles if there is no tile.
    __device__ __forceinline__ int number_in_tail(int round) const {
        const StaticScheduleParams& fixed = schedule.fixed;
        const int blocks = static_cast<int>(gridDim.x);
        const int place = (static_cast<int>(blockIdx.x) + fixed.pair_rounds + blocks - 1) % blocks;
        const int in_round = round % 2 == 0 ? fixed.tail_round - 1 - place : place;
        if (in_round < 0 || in_round >= fixed.tail_round) return fixed.tail_tiles;
        return fixed.tail_begin + round * fixed.tail_round + in_round;
    }
    __device__ __forceinline__ TileCoordinates tile_of_tail(int number) const {
        const StaticScheduleParams& fixed = schedule.fixed;
        if (number >= fixed.tail_tiles) return {-1, 0, 0};
        const TileInGroups at = TileInGroups::of(number, fixed.tail_heads, fixed.tail_group, fixed.tail_group_tiles);
        return tile_of_head(schedule, fixed.tail_head + at.head, fixed.tiles_of_head - 1 - at.tile);
    }
};

}  // namespace libflash::cuda::sm90
