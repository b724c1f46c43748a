// The query tiles that see a key tile, in all query heads that share its key head, and a position in their sequence.
#pragma once

#include "cuda/attention/query_tiles.cuh"

namespace libflash::cuda::sm90 {

// A position in the sequence of query tiles of all heads.
struct QueryTilePosition {
    int head, tile;
    int left;  // positive: the number of tiles left, this one included, or as in FixedOrderRange
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

// The same query tiles for BackwardTraits::kTilesInOrder: each query tile in all heads, then the next query tile, upwards or
// downwards. In `left` of a position are the heads that are left for this tile, and kTile for each tile after it: a consumer has
// no register for the head. Neither number overflows, because a key tile has at most 131072 rows of all heads in a launch
// (host/long_sums.h). No larger than QueryTileRange: with a larger work tile the compiler would serialise the products at
// head_dim 128.
template <int kBlockM, int kBlockN>
struct alignas(16) FixedOrderRange {
    static constexpr int kTile = 1 << 18;
    int step, next_tile;  // next_tile is added to `left` where no head is left
    int unmasked, count;  // as in QueryTileRange

    // `heads` heads from `first_head` on.
    __device__ __forceinline__ QueryTilePosition init(const QueryTileRange<kBlockM, kBlockN>& range, int first_head, int heads,
                                                      bool upwards) {
        *this = {upwards ? 1 : -1, heads - kTile, range.unmasked, range.count};
        const int tiles = range.end - range.begin;
        return {first_head, upwards ? range.begin : range.end - 1, tiles > 0 && heads > 0 ? (tiles - 1) * kTile + heads : 0};
    }
    // Moves the first position of one head by `first` tiles, of which it has `tiles`.
    __device__ __forceinline__ void skip(QueryTilePosition& at, int first, int tiles) const {
        at.tile += step * first;
        at.left = (tiles - 1) * kTile + 1;
    }
    __device__ __forceinline__ bool is_edge(int tile) const {
        return static_cast<unsigned>(tile - unmasked) >= static_cast<unsigned>(count);
    }
    __device__ __forceinline__ void advance(QueryTilePosition& at, int first_head) const {
        const FixedOrderRange range = *this;
        --at.left;
        const bool ends = at.left % kTile == 0;
        at.left += ends ? range.next_tile : 0;
        at.tile += ends ? range.step : 0;
        at.head = ends ? first_head : at.head + 1;
    }
};

}  // namespace libflash::cuda::sm90
