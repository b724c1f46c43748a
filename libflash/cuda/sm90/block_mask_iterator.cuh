// Iterates over the visible key tiles of a query tile under a block mask (blocks of 128 x 128), from the last to the first. A
// whole warp executes it.
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"

namespace libflash::cuda::sm90 {

// What a stage of K holds beside K.
enum class InShared { nothing, bias, mask };

// What the producer tells the consumers about a key tile: its number, whether it is the last one of the work tile, and what its
// stage holds beside K.
struct TileWord {
    uint32_t bits;

    __device__ static __forceinline__ TileWord of(int tile, bool last) {
        return {static_cast<uint32_t>(tile) << 3 | (last ? 1u : 0u)};
    }
    __device__ __forceinline__ int tile() const { return static_cast<int>(bits >> 3); }
    __device__ __forceinline__ bool last() const { return bits & 1u; }
    __device__ __forceinline__ void set_in_shared(InShared what) { bits |= static_cast<uint32_t>(what) << 1; }
    __device__ __forceinline__ InShared in_shared() const { return static_cast<InShared>(bits >> 1 & 3u); }
};

template <int kBlockM, int kBlockN>
struct BlockMaskIterator {
    static_assert(kBlockM == 128 && 128 % kBlockN == 0, "a tile of scores lies in one block");
    static constexpr int kTiles = 128 / kBlockN;  // key tiles in a block
    static constexpr int kWindow = 32,
                         kBlocks = kWindow / kTiles;  // key tiles, and blocks, that a warp examines together, one tile per lane
    static constexpr uint32_t kAll = 0xffffffffu;
    using Range = KeyRange<kBlockM, kBlockN>;

    // Derived values are recomputed from these members, because the producer warp has few registers.
    const BlockMaskParams& blocks;
    const TileCoordinates& work;
    const Range& range;
    int tile;          // tiles below it have not been visited
    int window;        // the window that `visible` describes, or -1
    uint32_t visible;  // a bit per tile of the window
    int entries_left;  // list entries that have not been visited

    __device__ __forceinline__ BlockMaskIterator(const BlockMaskParams& b, const TileCoordinates& w, const Range& r)
        : blocks(b), work(w), range(r), tile(r.end), window(-1), entries_left(b.counts ? b.counts[start(b.counts_stride)] : 0) {}

    // The next visible tile, or -1.
    __device__ __forceinline__ int next() {
        while (--tile >= range.begin) {
            if (tile / kWindow != window) load();
            const uint32_t not_visited = visible & kAll >> (kWindow - 1 - tile % kWindow);
            tile =
                // If the window has no visible tile left, __clz is 32, and this is the last tile before the window. ++tile below
                // makes up for the next --tile.
                window * kWindow + 31 - __clz(static_cast<int>(not_visited));
            if (not_visited != 0) return tile >= range.begin ? tile : -1;
            ++tile;
        }
        return -1;
    }

private:
    __device__ __forceinline__ int64_t start(const int64_t* stride) const {
        return work.batch * stride[0] + work.head * stride[1] + work.tile * stride[2];
    }
    __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x % 32); }

    __device__ __forceinline__ void load() {
        window = tile / kWindow;
        visible = __ballot_sync(kAll, blocks.mask ? is_in_mask() : (blocks.counts ? is_in_list() : true));
    }
    __device__ __forceinline__ bool is_in_mask() const {
        const int block = window * kBlocks + lane() / kTiles;
        return block * 128 < range.length_k && blocks.mask[start(blocks.mask_stride) + block * blocks.mask_stride[3]];
    }
    // Reads 32 list entries at a time, from the end. Entries ascend, so those past the window come first, then those in the
    // window.
    __device__ __forceinline__ bool is_in_list() {
        uint32_t found = 0;
        while (true) {
            const int at = entries_left - 1 - lane();
            const int block = at < 0 ? -1 : blocks.indices[start(blocks.indices_stride) + at * blocks.indices_stride[3]];
            if (block >= 0 && block / kBlocks == window) found |= 1u << block % kBlocks;
            const uint32_t passed = __ballot_sync(kAll, block >= window * kBlocks);
            entries_left -= __popc(passed);
            if (passed != kAll) break;
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) found |= __shfl_xor_sync(kAll, found, step);
        return found >> lane() / kTiles & 1;
    }
};

}  // namespace libflash::cuda::sm90
