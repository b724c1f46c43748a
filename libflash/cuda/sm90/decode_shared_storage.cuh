// The shared memory of the sm_90a decode kernel: first the tiles, then barriers, the work tile, and the data that the warpgroups
// exchange.
#pragma once

#include "cuda/sm90/consumer_exchanges.cuh"
#include "cuda/sm90/decode_pair.cuh"
#include "cuda/sm90/decode_traits.cuh"
#include "cuda/sm90/decode_work_tile.cuh"
#include "cuda/sm90/kernel_context.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

struct DecodeTensorMaps {
    CUtensorMap k;
    int box_rows;  // keys of a box: a power of two and a multiple of 16
};

// Shared addresses of the tiles.
template <class Traits>
struct DecodeSharedTiles {
    static constexpr int kBytes = Traits::kTileBytes;
    uint32_t q;

    __device__ __forceinline__ explicit DecodeSharedTiles(const char* memory) : q(shared_address(memory)) {}
    __device__ __forceinline__ uint32_t k(int stage) const { return q + Traits::QTile::kBytes + stage * Traits::KTile::kBytes; }
    __device__ __forceinline__ uint32_t p() const { return k(Traits::kStages); }
};

template <class Traits>
struct DecodeSharedStorage {
    uint64_t full[Traits::kStages][Traits::kChunks], empty[Traits::kStages][Traits::kParts];
    DecodeWorkTile work_tile;
    int2 seen[Traits::kBlockM];        // the keys of the split that each row sees
    float maximum[Traits::kBlockM];    // the kept maxima with which the last P was computed
    uint32_t absent[Traits::kStages];  // units of 16 keys whose page does not exist: a bit for each
    ConsumerExchanges<Traits> exchanges;

    // One thread calls it.
    __device__ __forceinline__ void init(const DecodePair<Traits>& pair) {
        for (int stage = 0; stage < Traits::kStages; ++stage) {
            for (int chunk = 0; chunk < Traits::kChunks; ++chunk) full_of(stage, chunk).init(1);
            for (int part = 0; part < Traits::kParts; ++part)
                empty_of(stage, part).init(4 * kArrivalsOfWarp + (pair.both_release(stage, part) ? 4 : 0));
        }
        exchanges.init();
        fence_barrier_init();
    }
    __device__ __forceinline__ MBarrier full_of(int stage, int chunk) const { return {shared_address(&full[stage][chunk])}; }
    __device__ __forceinline__ MBarrier empty_of(int stage, int part) const { return {shared_address(&empty[stage][part])}; }
};

// The context that all parts of the kernel use.
template <class Traits>
using DecodeContext = KernelContext<DecodeParams, DecodeTensorMaps, DecodeSharedStorage<Traits>, DecodeSharedTiles<Traits>>;

}  // namespace libflash::cuda::sm90
