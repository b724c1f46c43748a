// The shared memory of the sm_90a decode kernel for many rows: first the stages of K and V, then barriers, the work tile, and the
// data of its rows.
#pragma once

#include "cuda/sm90/decode_rows_traits.cuh"
#include "cuda/sm90/decode_work_tile.cuh"
#include "cuda/sm90/kernel_context.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

struct DecodeRowsTensorMaps {
    CUtensorMap k, v;
    int box_rows;  // keys of a box: a power of two and a multiple of 16
};

// Shared addresses of the tiles.
template <class Traits>
struct DecodeRowsTiles {
    static constexpr int kBytes = Traits::kTileBytes;
    uint32_t begin;

    __device__ __forceinline__ explicit DecodeRowsTiles(const char* memory) : begin(shared_address(memory)) {}
    __device__ __forceinline__ uint32_t k(int stage) const { return begin + stage * Traits::KTile::kBytes; }
    __device__ __forceinline__ uint32_t v(int stage) const { return k(Traits::kStages) + stage * Traits::VTile::kBytes; }
};

template <class Traits>
struct DecodeRowsStorage {
    PipelineBarriers<Traits::kStages> k, v;
    DecodeWorkTile work_tile;
    int32_t shift;                     // the number of the key on the diagonal of query row 0
    int2 seen[Traits::kBlockM];        // the keys of the split in the range of each row
    float slope[Traits::kBlockM];      // of ALiBi, in base-2 units
    uint32_t absent[Traits::kStages];  // units of 16 keys whose page does not exist: a bit for each

    // One thread calls it.
    __device__ __forceinline__ void init() {
        k.init(Traits::kConsumers / 32 * kArrivalsOfWarp);
        v.init(Traits::kConsumers / 32 * kArrivalsOfWarp);
        fence_barrier_init();
    }
};

// The context that all parts of the kernel use.
template <class Traits>
using DecodeRowsContext = KernelContext<DecodeParams, DecodeRowsTensorMaps, DecodeRowsStorage<Traits>, DecodeRowsTiles<Traits>>;

}  // namespace libflash::cuda::sm90
