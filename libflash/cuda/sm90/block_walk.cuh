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
    static constexpr int kWindow = 32,
                         kBlocks = kWindow / kTiles;  // tiles, and blocks, that are looked at together, a lane a tile
    static constexpr uint32_t kAll = 0xffffffffu;
    using Range = KeyRange<kBlockM, kBlockN>;

    // An item's own; the rest is made from it each time, because whoever walks has few registers.
    const BlockMaskParams& blocks;
    const WorkTile& work;
    const Range& range;
    const SequenceRows& q_rows;
    int tile;               // tiles before it have not been passed
    int window;             // that is known, or -1
    uint32_t seen_of_lane;  // the groups, a bit each, whose rows see something of this lane's tile of the window
    uint32_t some;          // tiles of the window that some group sees
    int* left;              // in shared memory, for each row of blocks: entries of its list not yet passed

    __device__ __forceinline__ BlockWalk(const BlockMaskParams& b, const WorkTile& w, const Range& r_, const SequenceRows& q,
                                         int* in_shared)
        : blocks(b), work(w), range(r_), q_rows(q), tile(r_.end), window(-1), left(in_shared) {
        if (!blocks.counts) return;
#pragma unroll
        for (int r = 0; r < kRows; ++r) set_left(r, exists(r) ? blocks.counts[start(blocks.counts_stride, r)] : 0);
    }

    // The next tile that any group sees, and which do; or -1.
    __device__ __forceinline__ int next(uint32_t& seen) {
        while (--tile >= range.begin) {
            if (tile / kWindow != window) load();
            const uint32_t here = some & kAll >> (kWindow - 1 - tile % kWindow);
            tile =
                window * kWindow + 31 - __clz(static_cast<int>(here));  // none: the last one before the window, and one too many
            if (here == 0) {
                ++tile;
                continue;
            }
            seen = __shfl_sync(kAll, seen_of_lane, tile % kWindow);
            return tile >= range.begin ? tile : -1;
        }
        return -1;
    }

private:
    __device__ __forceinline__ bool exists(int r) const { return (range.first_row / 128 + r) * 128 < q_rows.length; }
    __device__ __forceinline__ int64_t start(const int64_t* stride, int r) const {
        return work.batch * stride[0] + work.head * stride[1] + (range.first_row / 128 + r) * stride[2];
    }
    __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x % 32); }

    __device__ __forceinline__ void load() {
        window = tile / kWindow;
        bool has[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) has[r] = blocks.mask ? mask_has(r) : (blocks.counts ? list_has(r) : true);
        seen_of_lane = groups_that_see(has);
        some = __ballot_sync(kAll, seen_of_lane != 0);
    }
    __device__ __forceinline__ bool mask_has(int r) const {
        const int block = window * kBlocks + lane() / kTiles;
        return exists(r) && block * 128 < range.length_k &&
               blocks.mask[start(blocks.mask_stride, r) + block * blocks.mask_stride[3]];
    }
    // 32 entries at a time, from the last on. They ascend: first come those past the window, then its own.
    __device__ __forceinline__ bool list_has(int r) const {
        uint32_t found = 0;
        int count = left[r];
        while (true) {
            const int at = count - 1 - lane();
            const int block = at < 0 ? -1 : blocks.indices[start(blocks.indices_stride, r) + at * blocks.indices_stride[3]];
            if (block >= 0 && block / kBlocks == window) found |= 1u << block % kBlocks;
            const uint32_t passed = __ballot_sync(kAll, block >= window * kBlocks);
            count -= __popc(passed);
            if (passed != kAll) break;
        }
        set_left(r, count);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) found |= __shfl_xor_sync(kAll, found, step);
        return found >> lane() / kTiles & 1;
    }
    __device__ __forceinline__ void set_left(int r, int count) const {
        __syncwarp();
        if (lane() == 0) left[r] = count;
        __syncwarp();
    }

    __device__ __forceinline__ uint32_t groups_that_see(const bool (&has)[kRows]) const {
        const int first_col = (window * kWindow + lane()) * kBlockN, last_col = first_col + kBlockN - 1;
        uint32_t groups = 0;
#pragma unroll
        for (int group = 0; group < kBlockM / 64; ++group) {
            const int row = range.first_row + group * 64, last_row = min(row + 64, q_rows.length) - 1;
            const bool in_block = row / 128 == range.first_row / 128 ? has[0] : has[kRows - 1];
            const bool in_band = first_col <= last_row + range.shift + range.right && last_col >= row + range.shift - range.left;
            groups |= last_row >= row && in_block && in_band ? 1u << group : 0u;
        }
        return groups;
    }
};

}  // namespace libflash::cuda::sm90
