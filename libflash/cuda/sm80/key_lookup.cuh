// Where the keys lie that a warp of decode fetches: of a tile, one for each of its first 16 lanes. What the table says of them is asked for ahead of its use,
// and kept in shared memory.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/decode_params.h"

namespace libflash::cuda::sm80 {

template <int kTileK, int kStages>
struct KeyLookup {
    const KeyLocations& places;
    const VisibleKeys& range;
    int32_t* answers;  // of this warp, 16 for a stage
    int step;          // from stage to stage
    int own;           // the warp's first key of a tile
    int lane;

    // With the copies of the tile that goes to the same stage before that of keys from `first` on.
    __device__ __forceinline__ void ask(int stage, int first) const {
        const int key = first + own + lane;
        if (lane < kDecodeSlab && has(key)) places.ask(answers + stage * step + lane, key);
    }
    // Out of range: the key does not exist, or is not of this range.
    __device__ __forceinline__ KeyLocation look_up(int stage, int first) const {
        const int key = first + own + lane;
        return lane < kDecodeSlab && has(key) ? places.answered(answers + stage * step + lane, key) : KeyLocation{-1, 0};
    }

    // Of the first tiles, which nothing comes before: by loads, all of them at once, by all lanes.
    static constexpr int kRounds = (kStages * kDecodeSlab + 31) / 32;
    struct First {
        int32_t found[kRounds];
    };
    __device__ __forceinline__ First load_first(int stages, int begin) const {
        First first;
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            const int tile = tile_of(i), key = begin + tile * kTileK + own + lane % kDecodeSlab;
            first.found[i] = tile < stages && has(key) ? places.of(key).place : -1;
        }
        return first;
    }
    __device__ __forceinline__ void keep(const First& first, int stages) const {
#pragma unroll
        for (int i = 0; i < kRounds; ++i)
            if (tile_of(i) < stages) answers[tile_of(i) * step + lane % kDecodeSlab] = first.found[i];
        __syncwarp();
    }

private:
    __device__ __forceinline__ bool has(int key) const { return key >= range.first && key < range.last; }
    __device__ __forceinline__ int tile_of(int round) const { return (round * 32 + lane) / kDecodeSlab; }
};

}  // namespace libflash::cuda::sm80
