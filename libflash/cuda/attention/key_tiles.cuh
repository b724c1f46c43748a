// The key tiles of a query tile, from the last to the first, with block masks, and which of them are edge tiles. In kernels that
// need the registers for accumulators, one thread fills the struct in shared memory, and all read it there, a few words per tile.
#pragma once

#include "cuda/attention/key_range.cuh"

namespace libflash::cuda {

template <int kBlockM, int kBlockN>
struct KeyTiles : KeyRange<kBlockM, kBlockN> {
    using Range = KeyRange<kBlockM, kBlockN>;
    using Range::begin, Range::end, Range::first_row;
    const uint8_t* mask_row;  // dense block mask: the row of blocks of the query tile, or nullptr
    const int32_t* list;      // compressed block mask: the same row as ascending column numbers, or nullptr
    int64_t stride;           // between entries of either
    int list_count;

    __device__ __forceinline__ void init(const MaskParams& mask, const BlockMaskParams& blocks, const TileCoordinates& work,
                                         const SequenceRows& q, const SequenceRows& k) {
        Range::init(mask, work.tile, q.length, k.length);
        set_blocks(blocks, work);
    }
    // `seen`: for a shard with positions, seen[i] are the keys that row i of the tile sees (shard.cuh).
    __device__ __forceinline__ void init(const MaskParams& mask, const BlockMaskParams& blocks, const TileCoordinates& work,
                                         const SequenceRows& q, const SequenceRows& k, const int2* seen) {
        Range::init(mask, work.tile, q.length, k.length);
        const int last = min(kBlockM, q.length - first_row) - 1;
        if (last >= 0) Range::set_ranges(seen[0], seen[last]);
        set_blocks(blocks, work);
    }
    __device__ __forceinline__ void set_blocks(const BlockMaskParams& blocks, const TileCoordinates& work) {
        mask_row = nullptr;
        list = nullptr;
        list_count = 0;
        if (begin == end) return;
        const int block_row = first_row / 128;
        if (blocks.mask) {
            mask_row = blocks.mask + work.batch * blocks.mask_stride[0] + work.head * blocks.mask_stride[1] +
                       block_row * blocks.mask_stride[2];
            stride = blocks.mask_stride[3];
        } else if (blocks.counts) {
            list_count = blocks.counts[work.batch * blocks.counts_stride[0] + work.head * blocks.counts_stride[1] +
                                       block_row * blocks.counts_stride[2]];
            list = blocks.indices + work.batch * blocks.indices_stride[0] + work.head * blocks.indices_stride[1] +
                   block_row * blocks.indices_stride[2];
            stride = blocks.indices_stride[3];
        }
    }

    // The largest visible tile below `tile`, or -1. `cursor` is the number of list entries not yet passed; it starts as
    // list_count.
    __device__ __forceinline__ int previous(int tile, int& cursor) const {
        --tile;
        if (mask_row) {
            while (tile >= begin && !mask_row[tile * kBlockN / 128 * stride]) --tile;
        } else if (list) {
            while (tile >= begin) {
                const int block = tile * kBlockN / 128;
                while (cursor > 0 && list[(cursor - 1) * stride] > block) --cursor;
                if (cursor == 0) return -1;
                const int wanted = list[(cursor - 1) * stride];
                if (wanted == block) break;
                tile = min(tile - 1, (wanted + 1) * 128 / kBlockN - 1);
            }
        }
        return tile >= begin ? tile : -1;
    }
};

}  // namespace libflash::cuda
