// Cache locations of the 16 keys of a tile that a decode warp loads, one for each of its first 16 lanes. Block table entries are
// loaded ahead of their use with cp.async and kept in shared memory.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/decode_params.h"

namespace libflash::cuda::sm80 {

// Range: its members `first` and `last` are the range of keys [first, last).
template <int kTileK, int kStages, class Range = VisibleKeys>
struct KeyLookup {
    const KeyLocations& locations;
    const Range& range;
    int32_t* entries;   // block table entries for this warp in shared memory, 16 per stage
    int step;           // distance between two stages in `entries`
    int first_own_key;  // the warp's first key in a tile
    int lane;

    // Starts to load the block table entries of the tile that begins at key `first`. The caller calls it in the cp.async group of
    // the previous tile of the same stage, so the entries have arrived when that tile has arrived.
    __device__ __forceinline__ void begin(int stage, int first) const {
        const int key = first + first_own_key + lane;
        if (lane < kDecodeSlab && has(key)) locations.begin_lookup(entries + stage * step + lane, key);
    }
    // The location of the lane's key; invalid if the key does not exist or is not in this split.
    __device__ __forceinline__ KeyLocation look_up(int stage, int first) const {
        const int key = first + first_own_key + lane;
        return lane < kDecodeSlab && has(key) ? locations.finish_lookup(entries + stage * step + lane, key) : KeyLocation{-1, 0};
    }

    // The first tile of each stage has no earlier cp.async group. load_first() reads the block table entries of these tiles with
    // plain loads, by all lanes at once; store_first() stores them in shared memory. `advance`: the distance in keys from a tile
    // to the next one.
    static constexpr int kRounds = (kStages * kDecodeSlab + 31) / 32;
    struct FirstEntries {
        int32_t entries[kRounds];
    };
    __device__ __forceinline__ FirstEntries load_first(int stages, int begin, int advance = kTileK) const {
        FirstEntries first;
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            const int tile = tile_of(i), key = begin + tile * advance + first_own_key + lane % kDecodeSlab;
            first.entries[i] = tile < stages && has(key) ? locations.of(key).page : -1;
        }
        return first;
    }
    __device__ __forceinline__ void store_first(const FirstEntries& first, int stages) const {
#pragma unroll
        for (int i = 0; i < kRounds; ++i)
            if (tile_of(i) < stages) entries[tile_of(i) * step + lane % kDecodeSlab] = first.entries[i];
        __syncwarp();
    }

private:
    __device__ __forceinline__ bool has(int key) const { return key >= range.first && key < range.last; }
    __device__ __forceinline__ int tile_of(int round) const { return (round * 32 + lane) / kDecodeSlab; }
};

// KeyLookup where the 16 keys of a warp are always in one page: each lane has the page of every 32nd tile in a register.
struct PageLookup {
    int32_t page = -1;

    static __device__ __forceinline__ bool serves(const CacheParams& cache) {
        return cache.table && cache.page_size.divisor % kDecodeSlab == 0;
    }
    // `tile`: the number of the tile, which ascends from 0. `first`: the warp's first key in it.
    template <int kTileK, class Range>
    __device__ __forceinline__ KeyLocation look_up(const KeyLocations& locations, const Range& range, int tile, int first,
                                                   int lane) {
        if (tile % 32 == 0) {
            const int key = first + lane * kTileK;
            page = key < range.last ? locations.of(key).page : -1;
        }
        const int of_tile = __shfl_sync(0xffffffffu, page, tile % 32), key = first + lane;
        if (lane >= kDecodeSlab || key < range.first || key >= range.last) return {-1, 0};
        const int size = static_cast<int>(locations.page_size.divisor);
        return {of_tile, key - divide(key, locations.page_size) * size};
    }
};

}  // namespace libflash::cuda::sm80
