// The query tiles of a key tile, from the first to the last, and which of them are edge tiles: the reverse of key_tiles.cuh.
// All query heads have the same tiles, except with a block mask. If a key tile has several launches: the query tiles of this
// launch.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"

namespace libflash::cuda {

template <int kBlockM, int kBlockN>
struct QueryTiles {
    int batch;
    int first_col;  // of the key tile
    int shift;      // column of the diagonal in row 0
    int length_q, length_k;
    int left, right;
    int begin, end;  // query tiles [begin, end)

    template <class Params>
    __device__ __forceinline__ void init(const Params& params, const TileCoordinates& work, int queries, int keys) {
        batch = work.batch;
        first_col = work.tile * kBlockN;
        length_q = queries;
        length_k = keys;
        shift = params.mask.top_left ? 0 : length_k - length_q;
        left = params.mask.left;
        right = params.mask.right;
        const int last_col = min(first_col + kBlockN, length_k) - 1;
        const int first_row = max(0, first_col - shift - right);
        const int last_row = min(length_q, last_col - shift + left + 1);  // one past
        begin = first_row / kBlockM;
        end = last_col < first_col || last_row <= first_row ? begin : (last_row + kBlockM - 1) / kBlockM;
        begin = max(begin, params.part.first_row / kBlockM);
        end = min(end, params.part.end_row / kBlockM);
    }

    // For a shard with positions, after init(). of_first, of_last: the rows that see the first and the last key of the tile.
    // is_edge() then tests whether all rows of a query tile see both keys.
    __device__ __forceinline__ void set_ranges(const BackwardParams& params, int2 of_first, int2 of_last) {
        shift = 0;
        right = first_col + kBlockN - 1 - of_last.x;
        left = of_first.y - 1 - first_col;
        begin = max(of_first.x / kBlockM, params.part.first_row / kBlockM);
        end = of_last.y <= of_first.x ? begin : min((of_last.y + kBlockM - 1) / kBlockM, params.part.end_row / kBlockM);
    }

    // The smallest visible tile above `tile` for this query head, or -1. `cursor` is the number of list entries passed. The first
    // call has tile = begin - 1 and cursor = 0. `kLists`: whether the block mask may be lists.
    template <bool kLists = true>
    __device__ __forceinline__ int next(const BlockMaskParams& blocks, int head, int tile, int& cursor) const {
        ++tile;
        const int block_col = first_col / 128;
        if (blocks.mask) {
            const uint8_t* column =
                blocks.mask + batch * blocks.mask_stride[0] + head * blocks.mask_stride[1] + block_col * blocks.mask_stride[3];
            while (tile < end && !column[tile * kBlockM / 128 * blocks.mask_stride[2]]) ++tile;
        } else if (kLists && blocks.counts) {
            const int count = blocks.counts[batch * blocks.counts_stride[0] + head * blocks.counts_stride[1] +
                                            block_col * blocks.counts_stride[2]];
            const int32_t* list = blocks.indices + batch * blocks.indices_stride[0] + head * blocks.indices_stride[1] +
                                  block_col * blocks.indices_stride[2];
            const int block = tile * kBlockM / 128;
            while (cursor < count && list[cursor * blocks.indices_stride[3]] < block) ++cursor;
            if (cursor == count) return -1;
            tile = max(tile, list[cursor * blocks.indices_stride[3]] * 128 / kBlockM);
        }
        return tile < end ? tile : -1;
    }

    // Whether any score of the tile is masked by the lengths, the causal mask or the window.
    __device__ __forceinline__ bool is_edge(int tile) const {
        const int first_row = tile * kBlockM, last_row = first_row + kBlockM - 1, last_col = first_col + kBlockN - 1;
        return last_row >= length_q || last_col >= length_k || last_col > first_row + shift + right ||
               first_col < last_row + shift - left;
    }
};

}  // namespace libflash::cuda
