// The producer warp of the sm_90a decode kernel for values in the keys: loads key tiles from the cache by TMA, in boxes of rows
// that lie in one page (decode_pages.cuh).
#pragma once

#include "cuda/sm90/decode_pages.cuh"
#include "cuda/sm90/decode_shared_storage.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodeProducer {
    using KTile = typename Traits::KTile;
    using Pages = DecodePages<Traits::kBlockN>;
    static constexpr int kTilesAtOnce = Pages::kTilesAtOnce;

    const DecodeContext<Traits>& context;

    __device__ __forceinline__ void run() const {
        if (threadIdx.x >= 32) return;
        const bool leader = elect_one();
        const DecodeWorkTile& work_tile = context.storage.work_tile;
        const Pages pages{context.params.cache, work_tile, context.maps.box_rows};
        const KeyLocations locations(context.params.cache, work_tile.rows.batch);
        typename Pages::PageRow own{}, next = pages.read(locations, 0);
#pragma unroll 1
        for (int tile = 0; tile < work_tile.tiles; ++tile) {
            if (tile % kTilesAtOnce == 0) own = next, next = pages.read(locations, tile + kTilesAtOnce);
            const typename Pages::OfTile at = pages.of_tile(own, tile);
            if (leader) load(pages, tile, at);
            __syncwarp();
        }
    }

private:
    // Called by one thread. `absent` of a stage may be written when the warpgroup that reads it has released its values of the
    // stage's previous tile.
    __device__ __forceinline__ void load(const Pages& pages, int tile, const typename Pages::OfTile& at) const {
        const int stage = tile % Traits::kStages, group = stage;
        const uint32_t parity = static_cast<uint32_t>(tile / Traits::kStages) & 1;
        const DecodePair<Traits> pair(context.params);
#pragma unroll
        for (int n = 0; n < Traits::kChunks; ++n) {
            const int chunk = Traits::chunk_in_order(n, group);
            if (n == 0 || (n - Traits::kScoreChunks) % Traits::kPartChunks == 0)
                context.storage.empty_of(stage, Traits::part_of_chunk(chunk)).wait(parity ^ 1);
            if (n == Traits::kScoreChunks) context.storage.absent[stage] = at.absent_units;
            const MBarrier full = context.storage.full_of(stage, chunk);
            full.arrive_and_expect(KTile::kChunkBytes);
            const uint32_t to = context.tiles.k(stage) + chunk * KTile::kChunkBytes;
            if (!pair.in_pairs) {
                pages.load_chunk(to, context.maps.k, full, chunk * KTile::kChunkCols, at);
            } else if (pair.loads(stage, Traits::part_of_chunk(chunk))) {
                pages.template load_chunk<true>(to, context.maps.k, full, chunk * KTile::kChunkCols, at);
            }
        }
    }
};

}  // namespace libflash::cuda::sm90
