// A work tile of the sm_90a backward kernels for wide heads: 64 rows of one head, and the tiles of columns that they see. Tiles
// of columns are numbered in the order in which they are processed: ascending, one query head after another.
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/attention/query_units.cuh"
#include "cuda/sm90/backward_wide_traits.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardWideWorkTile {
    static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    using Tiles = std::conditional_t<Traits::kKeys, QueryTiles<kBlockM, kBlockN>, KeyRange<kBlockM, kBlockN>>;

    TileCoordinates at;          // head: of keys, for dq of queries
    SequenceRows rows, columns;  // of both sides
    Tiles tiles;
    int first_head, heads;  // of the columns
    int number_of_tiles;
    int units_before;  // see QueryUnits

    // The work tile with number `index` in the grid. Returns false if there is none.
    __device__ static __forceinline__ bool find(const BackwardParams& params, int index, TileCoordinates& at,
                                                SequenceRows& rows) {
        const LengthsParams& lengths = Traits::kKeys ? params.k_lengths : params.q_lengths;
        const ScheduleParams& schedule = Traits::kKeys ? params.key_schedule : params.query_tile_schedule;
        at = tile_coordinates<64>(schedule, lengths, params.batch, index);
        if (at.batch < 0) return false;
        rows = SequenceRows::of(lengths, at.batch);
        return at.tile * 64 < rows.owned;
    }
    __device__ __forceinline__ void init(const BackwardParams& params, const TileCoordinates& found, const SequenceRows& owned) {
        at = found;
        rows = owned;
        columns = SequenceRows::of(Traits::kKeys ? params.q_lengths : params.k_lengths, at.batch);
        units_before = QueryUnits::before(params, at.batch, (Traits::kKeys ? columns : rows).owned);
        if constexpr (Traits::kKeys) {
            tiles.init(params, at, columns.length, rows.length);
            first_head = at.head * params.group_size + params.part.first_head;
            heads = params.part.heads;
        } else {
            tiles.init(params.mask, at.tile, rows.length, columns.length);
            first_head = at.head / params.group_size;
            heads = 1;
        }
        number_of_tiles = max(tiles.end - tiles.begin, 0) * heads;
    }
    __device__ __forceinline__ int first_row() const { return at.tile * 64; }  // in its sequence
    // Moves a position (a head and a tile of columns) by `by` tiles.
    __device__ __forceinline__ void advance(int& head, int& tile, int by) const {
        tile += by;
        while (tile >= tiles.end) tile -= tiles.end - tiles.begin, ++head;
    }
    // The tile of columns before `tile`, which must not be the first tile of the first head.
    __device__ __forceinline__ int before(int tile) const { return (tile == tiles.begin ? tiles.end : tile) - 1; }
};

}  // namespace libflash::cuda::sm90
