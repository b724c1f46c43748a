// Which key tiles a tile of query rows has to look at where blocks of 128 x 128 are left out: from the last to the first, by a whole warp.
//
// The tile of query rows may lie in two rows of blocks; then each of its groups of 64 rows lies in one of them, and need not look at what only the other
// row of blocks has.
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"

namespace libflash::cuda::sm90 {

// A tile of keys, as the producer tells those who multiply: which it is, whether it is the item's last, for each group whether it does the tile, and
// whether its rows see anything of it.
struct TileWord {
    static constexpr int kGroups = 3;
    uint32_t bits;

    __device__ static __forceinline__ TileWord of(int tile, bool last, uint32_t done, uint32_t seen) {
        return {static_cast<uint32_t>(tile) << 7 | (last ? 64u : 0u) | done << kGroups | seen};
    }
    __device__ __forceinline__ int tile() const { return static_cast<int>(bits >> 7); }
    __device__ __forceinline__ bool last() const { return bits & 64u; }
    __device__ __forceinline__ bool done_by(int group) const { return bits >> kGroups >> group & 1; }
    __device__ __forceinline__ bool seen_by(int group) const { return bits >> group & 1; }
    __device__ __forceinline__ uint32_t seen() const { return bits & ((1u << kGroups) - 1); }
};

template <int kBlockM, int kBlockN>
struct BlockWalk {
    static_assert(128 % kBlockN == 0 && kBlockM % 64 == 0 && kBlockM <= 64 * TileWord::kGroups,
                  "a tile of keys lies in one block");
    static constexpr int kRows = kBlockM > 128 ? 2 : 1;  // of blocks
    static constexpr int kTiles = 128 / kBlockN;         // of keys in a block
    static constexpr uint32_t kAll = 0xffffffffu;
    using Range = KeyRange<kBlockM, kBlockN>;

    // An item's own; the rest is made from it each time, because whoever walks has few registers.
    const BlockMaskParams& blocks;
    const WorkTile& work;
    const Range& range;
    const SequenceRows& q_rows;
    int tile;              // tiles before it have not been passed
    uint32_t seen;         // the groups, a bit each, whose rows see something of it
    int window;            // of 32 blocks, whose bits are known
    uint32_t bits[kRows];  // of each row of blocks
    int* left;             // in shared memory, for each row of blocks: entries of its list not yet passed

    __device__ __forceinline__ BlockWalk(const BlockMaskParams& b, const WorkTile& w, const Range& r_, const SequenceRows& q,
                                         int* in_shared)
        : blocks(b), work(w), range(r_), q_rows(q), tile(r_.end), window(-1), left(in_shared) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            bits[r] = kAll;
            if (blocks.counts) set_left(r, exists(r) ? blocks.counts[start(blocks.counts_stride, r)] : 0);
        }
    }

    // The next tile that any group sees, or -1.
    __device__ __forceinline__ int next() {
        while (--tile >= range.begin) {
            if (!is_left_out() && (seen = groups_that_see()) != 0) return tile;
        }
        return -1;
    }

private:
    __device__ __forceinline__ bool exists(int r) const { return (range.first_row / 128 + r) * 128 < q_rows.length; }
    __device__ __forceinline__ int64_t start(const int64_t* stride, int r) const {
        return work.batch * stride[0] + work.head * stride[1] + (range.first_row / 128 + r) * stride[2];
    }
    // By all rows of blocks; then the next one is the last of a block that is not, or of those before the window.
    __device__ __forceinline__ bool is_left_out() {
        if (!blocks.mask && !blocks.counts) return false;
        const int block = tile / kTiles;
        if (block / 32 != window) load(block / 32);
        uint32_t any = bits[0];
        if (kRows == 2) any |= bits[kRows - 1];
        any &= kAll >> (31 - block % 32);
        const int found = window * 32 + 31 - __clz(static_cast<int>(any));
        if (found == block) return false;
        tile = (found + 1) * kTiles;
        return true;
    }
    __device__ __forceinline__ uint32_t groups_that_see() const {
        const int first_col = tile * kBlockN, last_col = first_col + kBlockN - 1;
        uint32_t groups = 0;
#pragma unroll
        for (int group = 0; group < kBlockM / 64; ++group) {
            const int row = range.first_row + group * 64, last_row = min(row + 64, q_rows.length) - 1;
            const bool has = bits[kRows - 1] >> tile / kTiles % 32 & 1, first_has = bits[0] >> tile / kTiles % 32 & 1;
            const bool in_block = row / 128 == range.first_row / 128 ? first_has : has;
            const bool in_band = first_col <= last_row + range.shift + range.right && last_col >= row + range.shift - range.left;
            groups |= last_row >= row && in_block && in_band ? 1u << group : 0u;
        }
        return groups;
    }
    __device__ __forceinline__ void load(int which) {
        window = which;
#pragma unroll
        for (int r = 0; r < kRows; ++r) bits[r] = blocks.mask ? bits_of_mask(r) : bits_of_list(r);
    }
    __device__ __forceinline__ uint32_t bits_of_mask(int r) const {
        const int block = window * 32 + static_cast<int>(threadIdx.x % 32);
        const bool there = exists(r) && block * 128 < range.length_k &&
                           blocks.mask[start(blocks.mask_stride, r) + block * blocks.mask_stride[3]];
        return __ballot_sync(kAll, there);
    }
    __device__ __forceinline__ void set_left(int r, int count) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) left[r] = count;
        __syncwarp();
    }
    // 32 entries at a time, from the last on. They ascend: first come those past the window, then its own.
    __device__ __forceinline__ uint32_t bits_of_list(int r) {
        uint32_t found = 0;
        int count = left[r];
        while (true) {
            const int at = count - 1 - static_cast<int>(threadIdx.x % 32);
            const int block = at < 0 ? -1 : blocks.indices[start(blocks.indices_stride, r) + at * blocks.indices_stride[3]];
            if (block >= 0 && block / 32 == window) found |= 1u << block % 32;
            const uint32_t passed = __ballot_sync(kAll, block >= window * 32);
            count -= __popc(passed);
            if (passed != kAll) break;
        }
        set_left(r, count);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) found |= __shfl_xor_sync(kAll, found, step);
        return found;
    }
};

}  // namespace libflash::cuda::sm90
