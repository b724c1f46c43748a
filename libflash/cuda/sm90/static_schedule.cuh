// The static schedule of the persistent thread blocks of sm_90a: each takes one unit in a round. A unit is a tile of query rows
// or, under a causal mask, a pair of a late tile and an early tile of a head, because all pairs take about the same time. The
// last round of pairs may be incomplete, which would leave thread blocks idle for the time of a pair. Therefore the tiles of the
// last heads, the tail, are not paired: they follow in rounds of one tile, the longest tiles of all these heads first, every
// second round in reverse order (host/static_schedule.h chooses the number of heads).
#pragma once

#include "cuda/attention/schedule.cuh"

namespace libflash::cuda::sm90 {

template <int kBlockM>
struct StaticSchedule {
    const ScheduleParams& schedule;
    const LengthsParams& rows;
    int batch;

    // Work tile `index` < schedule.fixed.most_tiles of this thread block; batch < 0: none.
    __device__ __forceinline__ TileCoordinates tile(int index) const {
        if (schedule.paired) return tile_of_pairs(index);
        const int number = number_in_round(index);
        if (number >= schedule.heads * schedule.tiles) return {-1, 0, 0};
        return tile_coordinates<kBlockM>(schedule, rows, batch, number);
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
        // A thread block that has no pair in the last round of pairs takes one tile of the tail instead.
        if (number >= fixed.pairs) return tile_of_tail(odd ? fixed.tail_tiles : number - fixed.pairs);
        const int head = divide(number, schedule.group_tiles), near = number - head * schedule.tiles;  // a group has one head
        const int far = fixed.tiles_of_head - 1 - near;
        if (odd && near == far) return {-1, 0, 0};
        return tile_of_head(head, odd ? near : far);
    }
    // In the rounds of the tail a thread block has the place of the last round of pairs, counted from the other end every second
    // time.
    __device__ __forceinline__ int number_in_tail(int round) const {
        const StaticScheduleParams& fixed = schedule.fixed;
        const int blocks = static_cast<int>(gridDim.x), complete = fixed.pair_rounds - (fixed.tail_begin > 0);
        const int place = (static_cast<int>(blockIdx.x) + complete) % blocks;
        return fixed.tail_begin + round * blocks + (round % 2 == 0 ? blocks - 1 - place : place);
    }
    __device__ __forceinline__ TileCoordinates tile_of_tail(int number) const {
        const StaticScheduleParams& fixed = schedule.fixed;
        if (number >= fixed.tail_tiles) return {-1, 0, 0};
        const int tile = divide(number, fixed.tail_heads);
        const int head = fixed.tail_head + number - tile * static_cast<int>(fixed.tail_heads.divisor);
        return tile_of_head(head, fixed.tiles_of_head - 1 - tile);
    }
    // `head`: counted over all sequences.
    __device__ __forceinline__ TileCoordinates tile_of_head(int head, int tile) const {
        const int entry = divide(head, schedule.sequence);
        return {entry, head - entry * static_cast<int>(schedule.sequence.divisor), tile};
    }
};

}  // namespace libflash::cuda::sm90
