// The producer warp of the sm_90a decode kernel for many rows: loads tiles of K and V from the cache by TMA (decode_pages.cuh). A
// stage of K is released after the scores, a stage of V after the products with P.
#pragma once

#include "cuda/sm90/decode_pages.cuh"
#include "cuda/sm90/decode_rows_storage.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodeRowsProducer {
    using Pages = DecodePages<Traits::kBlockN>;
    using State = PipelineState<Traits::kStages>;
    static constexpr int kTilesAtOnce = Pages::kTilesAtOnce;

    const DecodeRowsContext<Traits>& context;

    __device__ __forceinline__ void run() const {
        const bool leader = elect_one();
        const DecodeWorkTile& work_tile = context.storage.work_tile;
        const Pages pages{context.params.cache, work_tile, context.maps.box_rows};
        const KeyLocations locations(context.params.cache, work_tile.rows.batch);
        typename Pages::PageRow own{}, next = pages.read(locations, 0);
        State k(context.storage.k), v(context.storage.v);
#pragma unroll 1
        for (int tile = 0; tile < work_tile.tiles; ++tile) {
            if (tile % kTilesAtOnce == 0) own = next, next = pages.read(locations, tile + kTilesAtOnce);
            const typename Pages::OfTile at = pages.of_tile(own, tile);
            if (leader) {
                k.wait_empty();
                context.storage.absent[k.stage] = at.absent_units;
                load<typename Traits::KTile>(pages, context.tiles.k(k.stage), context.maps.k, k.full(), at);
                v.wait_empty();
                load<typename Traits::VTile>(pages, context.tiles.v(v.stage), context.maps.v, v.full(), at);
            }
            __syncwarp();
            k.advance();
            v.advance();
        }
    }

private:
    template <class Tile>
    __device__ __forceinline__ static void load(const Pages& pages, uint32_t to, const CUtensorMap& map, const MBarrier& full,
                                                const typename Pages::OfTile& at) {
        full.arrive_and_expect(Tile::kBytes);
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
            pages.load_chunk(to + chunk * Tile::kChunkBytes, map, full, chunk * Tile::kChunkCols, at);
    }
};

}  // namespace libflash::cuda::sm90
