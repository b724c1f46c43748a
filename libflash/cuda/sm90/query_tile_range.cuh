// The query tiles that see a key tile, in all query heads that share its key head, and a position in their sequence.
#pragma once

#include "cuda/attention/query_tiles.cuh"

namespace libflash::cuda::sm90 {

// A position in the sequence of query tiles of all heads.
struct QueryTilePosition {
    int head, tile;
    int left;  // number of tiles left, this one included
};
// The position under a block mask, where the number of tiles is not known: `left` is 0 after the last tile, else 1.
struct VisibleTilePosition : QueryTilePosition {
    int cursor;  // of QueryTiles::next
};

// The query tiles [begin, end) of each head. Those outside [unmasked, unmasked + count) are edge tiles.
template <int kBlockM, int kBlockN>
struct alignas(16) QueryTileRange {
    int begin, end, unmasked, count;

    // Must agree with QueryTiles::is_edge.
    __device__ static __forceinline__ QueryTileRange of(const QueryTiles<kBlockM, kBlockN>& tiles) {
        const int last_col = tiles.first_col + kBlockN - 1;
        const int first_row =
            // Rows from first_row on see the last key of the tile; rows up to last_row see the first one.
            last_col - tiles.shift - tiles.right;
        const int last_row = min(tiles.length_q - 1, tiles.first_col - tiles.shift + tiles.left);
        const int unmasked = max(tiles.begin, (max(first_row, 0) + kBlockM - 1) / kBlockM);
        const int end = last_col < tiles.length_k && last_row >= 0 ? min(tiles.end, (last_row + 1) / kBlockM) : 0;
        return {tiles.begin, tiles.end, unmasked, max(0, end - unmasked)};
    }
    __device__ __forceinline__ bool is_edge(int tile) const {
        return static_cast<unsigned>(tile - unmasked) >= static_cast<unsigned>(count);
    }
    __device__ __forceinline__ QueryTilePosition first(int first_head, int heads) const {
        return {first_head, begin, (end - begin) * heads};
    }
    // Moves the first position by `count` tiles.
    __device__ __forceinline__ void skip(QueryTilePosition& at, int count) const {
        if (end == begin) return;
        const int heads = count / (end - begin);
        at.head += heads;
        at.tile += count - heads * (end - begin);
    }
    __device__ __forceinline__ void advance(QueryTilePosition& at) const {
        const QueryTileRange range = *this;
        --at.left;
        const bool ends = at.tile + 1 == range.end;
        at.tile = ends ? range.begin : at.tile + 1;
        at.head += ends;
    }
};

}  // namespace libflash::cuda::sm90
