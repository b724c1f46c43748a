// A work tile of the sm_90a backward_tangent kernels, the column tiles that it visits (for keys the query tiles of all query
// heads that share them, for queries the key tiles), and which work tiles a thread block computes.
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/attention/query_units.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/tangent_params.h"

#include <type_traits>

namespace libflash::cuda::sm90 {

// Column tiles of the rows of one warpgroup: those that some row sees, and those that all its rows see in full. What rows beyond
// the sequence see does not matter, because their results are not written.
struct GroupColumnTiles {
    int begin, end, unmasked_begin, unmasked_end;

    __device__ __forceinline__ bool is_edge(int tile) const { return tile < unmasked_begin || tile >= unmasked_end; }
    __device__ __forceinline__ bool sees(int tile) const { return tile >= begin && tile < end; }
};

// A position in the sequence of column tiles of all heads.
struct ColumnTilePosition {
    int head, tile;
    int left;  // number of tiles left, this one included
};

template <class Traits>
struct BackwardTangentWorkTile {
    static constexpr bool kKeys = Traits::kKeys;
    static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    using Tiles = std::conditional_t<kKeys, QueryTiles<kBlockN, kBlockM>, KeyRange<kBlockM, kBlockN>>;

    TileCoordinates at;  // batch < 0: the end mark
    SequenceRows rows, cols;
    Tiles tiles;
    GroupColumnTiles of_group[Traits::kGroups];
    int first_head, heads;  // of the columns
    int units_before;       // see QueryUnits
    int loaded_cols;        // where only the device knows lengths: columns from this one on may hold other data

    __device__ __forceinline__ void init(const BackwardTangentParams& params, const TileCoordinates& work) {
        at = work;
        if (work.batch < 0) return;
        const SequenceRows q_rows = SequenceRows::of(params.q_lengths, work.batch);
        const SequenceRows k_rows = SequenceRows::of(params.k_lengths, work.batch);
        const LengthsParams& lengths = kKeys ? params.q_lengths : params.k_lengths;
        units_before = QueryUnits::before(params, work.batch, q_rows.owned);
        rows = kKeys ? k_rows : q_rows;
        cols = kKeys ? q_rows : k_rows;
        loaded_cols = lengths.cu || lengths.used ? cols.length : INT32_MAX;
        if constexpr (kKeys) {
            tiles.init(params, work, q_rows.length, k_rows.length);
            first_head = work.head * params.group_size;
            heads = params.group_size;
        } else {
            tiles.init(params.mask, work.tile, q_rows.length, k_rows.length);
            first_head = work.head / params.group_size;
            heads = 1;
        }
        for (int group = 0; group < Traits::kGroups; ++group) of_group[group] = tiles_of_group(group);
    }

    __device__ __forceinline__ bool is_end() const { return at.batch < 0; }
    __device__ __forceinline__ ColumnTilePosition first() const {
        return {first_head, tiles.begin, (tiles.end - tiles.begin) * heads};
    }
    __device__ __forceinline__ void advance(ColumnTilePosition& position) const {
        --position.left;
        const bool ends = position.tile + 1 == tiles.end;
        position.tile = ends ? tiles.begin : position.tile + 1;
        position.head += ends;
    }
    // The first row of the tile, in its sequence.
    __device__ __forceinline__ int first_row() const { return at.tile * kBlockM; }

private:
    // Row i sees the columns from i + first_of on, up to i + last_of.
    __device__ __forceinline__ GroupColumnTiles tiles_of_group(int group) const {
        constexpr int kRows = Traits::kGroupRows;
        const int first = first_row() + group * kRows, count = min(rows.length - first, kRows);
        const int first_of = kKeys ? -tiles.shift - tiles.right : tiles.shift - tiles.left;
        const int last_of = kKeys ? tiles.left - tiles.shift : tiles.shift + tiles.right;
        const int seen_begin = max(first + first_of, 0), seen_end = min(cols.length, max(first + count + last_of, 0));
        GroupColumnTiles of;
        of.begin = min(max(seen_begin / kBlockN, tiles.begin), tiles.end);
        of.end =
            count <= 0 || seen_end <= seen_begin ? of.begin : max(min((seen_end + kBlockN - 1) / kBlockN, tiles.end), of.begin);
        of.unmasked_begin = (max(first + kRows - 1 + first_of, 0) + kBlockN - 1) / kBlockN;
        of.unmasked_end = max(min(cols.length, first + last_of + 1), 0) / kBlockN;
        return of;
    }
};

// Thread blocks take work tiles by number. A counter in the workspace gives the next number; without a counter each thread block
// has one work tile.
template <class Traits>
struct BackwardTangentSchedule {
    static constexpr int kScheduled = Traits::kBlockM / Traits::config.tile_q;  // tiles of the schedule in a work tile
    int number = -1;

    // Finds the next work tile with rows; batch < 0: none is left. Warp 0 calls it; all lanes get the same work tile.
    __device__ __forceinline__ TileCoordinates find(const BackwardTangentParams& params) {
        const ScheduleParams& schedule = Traits::kKeys ? params.key_schedule : params.query_schedule;
        const LengthsParams& lengths = Traits::kKeys ? params.k_lengths : params.q_lengths;
        while (true) {
            number = number < 0 ? static_cast<int>(blockIdx.x) : next(params);
            if (number >= schedule.heads * schedule.tiles) return {-1, 0, 0};
            TileCoordinates work = tile_coordinates<Traits::config.tile_q>(schedule, lengths, params.batch, number);
            if (kScheduled > 1 && work.batch >= 0) {
                if (work.tile % kScheduled != 0) continue;
                work.tile /= kScheduled;
            }
            if (work.batch >= 0 && work.tile * Traits::kBlockM < SequenceRows::of(lengths, work.batch).owned) return work;
        }
    }

private:
    __device__ static __forceinline__ int next(const BackwardTangentParams& params) {
        if (Traits::kWide || !params.next_tiles)
            return INT32_MAX;  // kWide: the plan has no counter, and code for it takes registers
        int taken = 0;
        if (threadIdx.x == 0) taken = atomicAdd(params.next_tiles + (Traits::kKeys ? 1 : 0), 1);
        return __shfl_sync(0xffffffffu, taken, 0) + static_cast<int>(gridDim.x);
    }
};

}  // namespace libflash::cuda::sm90
