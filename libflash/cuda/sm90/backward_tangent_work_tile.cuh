// The work tile of a thread block of the sm_90a backward_tangent kernels, and the column tiles that it visits: for keys the query
// tiles of all query heads that share them, for queries the key tiles.
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/tangent_params.h"

#include <type_traits>

namespace libflash::cuda::sm90 {

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

    TileCoordinates at;
    SequenceRows rows, cols;
    Tiles tiles;
    int first_head, heads;  // of the columns
    int loaded_cols;        // where only the device knows lengths: columns from this one on may hold data of others

    __device__ static __forceinline__ TileCoordinates find(const BackwardTangentParams& params) {
        return tile_coordinates<kBlockM>(kKeys ? params.key_schedule : params.query_schedule,
                                         kKeys ? params.k_lengths : params.q_lengths, params.batch);
    }
    __device__ __forceinline__ void init(const BackwardTangentParams& params, const TileCoordinates& work) {
        at = work;
        const SequenceRows q_rows = SequenceRows::of(params.q_lengths, work.batch);
        const SequenceRows k_rows = SequenceRows::of(params.k_lengths, work.batch);
        const LengthsParams& lengths = kKeys ? params.q_lengths : params.k_lengths;
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
    }

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
};

}  // namespace libflash::cuda::sm90
