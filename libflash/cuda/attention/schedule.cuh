// Computes the batch entry, head and tile of a work tile from its index; and the lengths of a sequence.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/prefix_sum.cuh"

namespace libflash::cuda {

// The rows of one side of one sequence.
struct SequenceRows {
    int32_t start;   // first row, inside the batch entry (dense) or the tensor (packed)
    int32_t owned;   // rows of the sequence
    int32_t length;  // rows in use (used length)

    __device__ static __forceinline__ SequenceRows of(const LengthsParams& lengths, int batch) {
        SequenceRows rows;
        if (lengths.cu) {
            // Lengths come from the device unchecked: clamp them to the tensor, so that wrong lengths cause no access outside of
            // it.
            const int first = min(max(lengths.cu[batch], 0), lengths.capacity);
            const int last = min(max(lengths.cu[batch + 1], first), lengths.capacity);
            rows.start = first;
            rows.owned = last - first;
        } else {
            rows.start = 0;
            rows.owned = lengths.capacity;
        }
        rows.length = lengths.used ? min(max(lengths.used[batch], 0), rows.owned) : rows.owned;
        return rows;
    }
};

struct TileCoordinates {
    int32_t batch, head, tile;  // batch < 0: nothing to do
};

// Tiles of the rows of a packed sequence.
template <int kTileRows>
__device__ __forceinline__ int packed_tiles(const LengthsParams& lengths, int batch) {
    return (SequenceRows::of(lengths, batch).owned + kTileRows - 1) / kTileRows;
}

// Packed sequences: `index` counts the tiles of all sequences; finds the sequence by prefix sums over 32 sequences at a time.
// Every warp of the thread block computes the same result.
template <int kTileRows>
__device__ __forceinline__ TileCoordinates find_packed_tile(const LengthsParams& lengths, int batch_count, int index, int head) {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int first = 0; first < batch_count; first += 32) {
        const int batch = first + lane;
        int tiles = 0;
        if (batch < batch_count) tiles = packed_tiles<kTileRows>(lengths, batch);
        const int sum = inclusive_prefix_sum(tiles, lane);
        const int total = __shfl_sync(0xffffffffu, sum, 31);
        if (index < before + total) {
            const unsigned past = __ballot_sync(0xffffffffu, before + sum > index);
            const int winner = __ffs(static_cast<int>(past)) - 1;
            const int winner_first = __shfl_sync(0xffffffffu, before + sum - tiles, winner);
            return {first + winner, head, index - winner_first};
        }
        before += total;
    }
    return {-1, 0, 0};
}

__device__ __forceinline__ int divide(int n, const Divisor& by) {
    return by.divisor == 1 ? n : static_cast<int>(__umulhi(static_cast<uint32_t>(n), by.multiplier) >> by.shift);
}

// A tile of a head by its number in an order by groups of heads: first tile 0 of all heads of a group, then tile 1. The last
// group may have fewer heads.
struct TileInGroups {
    int32_t head, tile;

    __device__ static __forceinline__ TileInGroups of(int number, int heads, const Divisor& heads_of_group,
                                                      const Divisor& group_tiles) {
        const int group = divide(number, group_tiles), of_group = static_cast<int>(heads_of_group.divisor);
        const int item = number - group * static_cast<int>(group_tiles.divisor);
        const int first = group * of_group, here = min(of_group, heads - first);
        const int tile = here == of_group ? divide(item, heads_of_group) : item / here;
        return {first + item - tile * here, tile};
    }
};

// A tile of a head, which is counted over all sequences; not of packed sequences.
__device__ __forceinline__ TileCoordinates tile_of_head(const ScheduleParams& schedule, int head, int tile) {
    const int entry = divide(head, schedule.sequence);
    return {entry, head - entry * static_cast<int>(schedule.sequence.divisor), tile};
}

// Work tile `index`. `lengths`: the lengths of the side whose tiles are scheduled. kMayBePacked: false saves code.
template <int kTileRows, bool kMayBePacked = true>
__device__ __forceinline__ TileCoordinates tile_coordinates(const ScheduleParams& schedule, const LengthsParams& lengths,
                                                            int batch, int index) {
    const TileInGroups at = TileInGroups::of(index, schedule.heads, schedule.group, schedule.group_tiles);
    const int tile = schedule.reversed ? schedule.tiles - 1 - at.tile : at.tile;
    if (kMayBePacked && lengths.cu) return find_packed_tile<kTileRows>(lengths, batch, tile, at.head);
    return tile_of_head(schedule, at.head, tile);
}

// The work tile of a thread block that has only one.
template <int kTileRows>
__device__ __forceinline__ TileCoordinates tile_coordinates(const ScheduleParams& schedule, const LengthsParams& lengths,
                                                            int batch) {
    return tile_coordinates<kTileRows>(schedule, lengths, batch, static_cast<int>(blockIdx.x));
}

}  // namespace libflash::cuda
