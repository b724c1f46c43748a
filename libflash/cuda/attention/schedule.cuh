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

// Packed sequences: `index` counts the tiles of all sequences; finds the sequence by prefix sums over 32 sequences at a time.
// Every warp of the thread block computes the same result.
template <int kTileRows>
__device__ __forceinline__ TileCoordinates find_packed_tile(const LengthsParams& lengths, int batch_count, int index, int head) {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int first = 0; first < batch_count; first += 32) {
        const int batch = first + lane;
        int tiles = 0;
        if (batch < batch_count) tiles = (SequenceRows::of(lengths, batch).owned + kTileRows - 1) / kTileRows;
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

// Work tile `index`. `lengths`: the lengths of the side whose tiles are scheduled.
template <int kTileRows>
__device__ __forceinline__ TileCoordinates tile_coordinates(const ScheduleParams& schedule, const LengthsParams& lengths,
                                                            int batch, int index) {
    const int group = divide(index, schedule.group_tiles);
    const int item = index - group * static_cast<int>(schedule.group_tiles.divisor);
    const int first_head = group * schedule.heads_per_group;
    const int heads_here = min(schedule.heads_per_group, schedule.heads - first_head);
    int tile = heads_here == schedule.heads_per_group ? divide(item, schedule.group) : item / heads_here;
    const int head = first_head + item - tile * heads_here;
    if (schedule.reversed) tile = schedule.tiles - 1 - tile;
    if (lengths.cu) return find_packed_tile<kTileRows>(lengths, batch, tile, head);
    const int entry = divide(head, schedule.sequence);
    return {entry, head - entry * static_cast<int>(schedule.sequence.divisor), tile};
}

// The work tile of a thread block that has only one.
template <int kTileRows>
__device__ __forceinline__ TileCoordinates tile_coordinates(const ScheduleParams& schedule, const LengthsParams& lengths,
                                                            int batch) {
    return tile_coordinates<kTileRows>(schedule, lengths, batch, static_cast<int>(blockIdx.x));
}

}  // namespace libflash::cuda
