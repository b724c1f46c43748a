// The shared memory of the sm_90a kernel for keys that sequences share: first Q, the stages of K and V, and zeros, then barriers,
// the work tile, and the data of its rows.
#pragma once

#include "cuda/attention/shared_prefix.cuh"
#include "cuda/sm90/decode_prefix_traits.cuh"
#include "cuda/sm90/kernel_context.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

struct DecodePrefixTensorMaps {
    CUtensorMap k;  // boxes of the keys of a unit
};

// Shared addresses of the tiles.
template <class Traits>
struct DecodePrefixTiles {
    using NoValues = SwizzledTile<Traits::kUnit, Traits::kHeadDim>;  // V of a unit, zeros
    static constexpr int kNoValuesBytes = NoValues::kBytes, kBytes = Traits::kTileBytes + kNoValuesBytes;
    uint32_t q;

    __device__ __forceinline__ explicit DecodePrefixTiles(const char* memory) : q(shared_address(memory)) {}
    __device__ __forceinline__ uint32_t q_of(int group) const { return q + group * Traits::QTile::kBytes; }
    __device__ __forceinline__ uint32_t k(int stage) const { return q_of(Traits::kMostGroups) + stage * Traits::KTile::kBytes; }
    __device__ __forceinline__ uint32_t v(int stage) const { return k(Traits::kStages) + stage * Traits::VTile::kBytes; }
    __device__ __forceinline__ uint32_t no_values() const { return v(Traits::kStages); }
};

// A key tile has kUnits units of one class of keys (sm80/decode_prefix.cuh). Every `classes`-th unit of all keys belongs to the
// class.
struct PrefixWorkTile {
    int32_t head_k, split, classes, of_class;
    int32_t sequence;          // of the group: the sequence whose block table gives the keys
    int32_t shared_keys;       // of the group, in all splits
    int32_t first, last;       // keys that some row sees: [first, last)
    int32_t plain, plain_end;  // the keys of these that all rows see
    int32_t begin, tiles;      // first key of the first tile, of all classes; number of tiles

    struct Tiles {
        int first, end;
    };
    // The tiles whose keys all rows see.
    __device__ __forceinline__ Tiles plain_tiles(int tile_keys) const {
        const int keys = tile_keys * classes, low = key_of(0, tile_keys, 0), high = key_of(0, tile_keys, tile_keys - 1);
        return {plain <= low ? 0 : (plain - low - 1) / keys + 1, plain_end <= high ? 0 : (plain_end - high - 1) / keys + 1};
    }
    // The number in the sequence of key `key` of a tile.
    __device__ __forceinline__ int key_of(int tile, int tile_keys, int key) const {
        const int unit = key / kDecodeSlab, in_unit = key % kDecodeSlab;
        return begin + (tile * tile_keys + unit * kDecodeSlab) * classes + of_class * kDecodeSlab + in_unit;
    }
};

template <class Traits>
struct DecodePrefixStorage {
    PipelineBarriers<Traits::kStages> k, v;
    PrefixWorkTile work_tile;
    PrefixRow rows[Traits::kMostRows];  // Traits::rows() of them
    uint32_t absent[Traits::kStages];   // units whose page does not exist: a bit for each

    // One thread calls it.
    __device__ __forceinline__ void init() {
        k.init(Traits::consumers() / 32 * kArrivalsOfWarp, Traits::KTile::kChunks);
        v.init(Traits::consumers() / 32 * kArrivalsOfWarp, Traits::kProducerWarps * kArrivalsOfWarp);
        fence_barrier_init();
    }
};

// The context that all parts of the kernel use.
template <class Traits>
using DecodePrefixContext =
    KernelContext<DecodeParams, DecodePrefixTensorMaps, DecodePrefixStorage<Traits>, DecodePrefixTiles<Traits>>;

}  // namespace libflash::cuda::sm90
