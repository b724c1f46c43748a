// The static schedule of the persistent thread blocks of sm_90a: each takes one unit in a round. A unit is a tile of query rows or,
// under a causal mask, a pair of a late tile and an early tile of a head, because all pairs take about the same time. The last
// round of pairs may be incomplete, which would leave thread blocks idle for the time of a pair. Therefore the tiles of the last
// heads, the tail, are not paired: they follow in rounds of one tile, the longest tiles of all these heads first, every second
// round in reverse order (host/static_schedule.h chooses the number of heads).
#pragma once

#include "cuda/attention/schedule.cuh"

namespace libflash::cuda::sm90 {

template <int kBlockM>
struct StaticSchedule {
    const ScheduleParams& schedule;
    const LengthsParams& rows;
    int batch;

    // Work tile `index` < schedule.most_tiles of this thread block; batch < 0: none.
    __device__ __forceinline__ TileCoordinates tile(int index) const {
        return schedule.paired ? tile_of_pairs(index) : unit(index, schedule.heads * schedule.tiles);
    }

private:
    // Unit of a round among the first `units`. The units of a round are rotated by one thread block from round to round: otherwise
    // a thread block could get the same tile of every head, which may be longer or shorter than the rest.
    __device__ __forceinline__ TileCoordinates unit(int round, int units) const {
        const int blocks = static_cast<int>(gridDim.x);
        const int number = round * blocks + (static_cast<int>(blockIdx.x) + round) % blocks;
        if (number >= units) return {-1, 0, 0};
        return tile_coordinates<kBlockM>(schedule, rows, batch, number);
    }
    __device__ __forceinline__ int tiles_of_head() const { return (rows.capacity + kBlockM - 1) / kBlockM; }

    __device__ __forceinline__ TileCoordinates tile_of_pairs(int index) const {
        const int pairs = schedule.tail_head * schedule.tiles, blocks = static_cast<int>(gridDim.x);
        const int rounds = (pairs + blocks - 1) / blocks;
        if (index >= 2 * rounds) return tile_of_tail(index - 2 * rounds, pairs);
        TileCoordinates work = unit(index / 2, pairs);
        if (work.batch < 0) return index % 2 == 0 ? tile_of_tail(-1, pairs) : work;
        const int near = work.tile, far = tiles_of_head() - 1 - near;
        if (index % 2 == 1 && near == far) return {-1, 0, 0};
        work.tile = index % 2 == 1 ? near : far;
        return work;
    }
    // Round -1: a thread block that has no pair in the last round of pairs takes a tile of the tail instead.
    __device__ __forceinline__ TileCoordinates tile_of_tail(int round, int pairs) const {
        const int blocks = static_cast<int>(gridDim.x), rounds = pairs / blocks, rest = pairs - rounds * blocks;
        const int place = (static_cast<int>(blockIdx.x) + rounds) % blocks, heads = schedule.heads - schedule.tail_head;
        int number = place - rest;
        if (round >= 0) number = (rest > 0 ? blocks - rest : 0) + round * blocks + (round % 2 == 0 ? blocks - 1 - place : place);
        if (number >= heads * tiles_of_head()) return {-1, 0, 0};
        const int tile = number / heads, head = schedule.tail_head + number - tile * heads;
        const int entry = divide(head, schedule.sequence);
        return {entry, head - entry * static_cast<int>(schedule.sequence.divisor), tiles_of_head() - 1 - tile};
    }
};

}  // namespace libflash::cuda::sm90
