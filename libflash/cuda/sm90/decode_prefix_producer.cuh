// The producer of the sm_90a kernel for keys that sequences share: loads tiles of K and V from the cache by TMA. A stage of K
// is free again after the scores, one of V after the products with P.
#pragma once

#include "cuda/sm90/decode_prefix_fetch.cuh"
#include "cuda/sm90/decode_prefix_storage.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodePrefixProducer {
    static constexpr int kUnit = Traits::kUnit, kUnits = Traits::kUnits, kTilesAtOnce = 32 / kUnits;
    using State = PipelineState<Traits::kStages>;

    // Of a unit: its page or entry, and the row there of its first key. Instead of a page: hidden() or absent(), which are
    // outside the tensor, so that TMA writes zeros.
    struct PageRow {
        int page, row;
    };

    const DecodePrefixContext<Traits>& context;

    // One warp of the warpgroup; the others prefetch.
    __device__ __forceinline__ void run() const {
        if (uniform_warp() > 0) return DecodePrefixFetch<Traits>{context}.run(uniform_warp() - 1);
        const bool leader = elect_one();
        const PrefixWorkTile& work_tile = context.storage.work_tile;
        const KeyLocations locations(context.params.cache, work_tile.sequence);
        PageRow own{}, next = read(locations, 0);
        State k(context.storage.k), v(context.storage.v);
#pragma unroll 1
        for (int tile = 0; tile < work_tile.tiles; ++tile) {
            if (tile % kTilesAtOnce == 0) own = next, next = read(locations, tile + kTilesAtOnce);
            PageRow at[kUnits];
            uint32_t absent_units = 0;
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit) {
                at[unit].page = __shfl_sync(0xffffffffu, own.page, tile % kTilesAtOnce * kUnits + unit);
                at[unit].row = __shfl_sync(0xffffffffu, own.row, tile % kTilesAtOnce * kUnits + unit);
                if (at[unit].page == absent()) absent_units |= 1u << unit;
            }
            if (leader) {
                k.wait_empty();
                context.storage.absent[k.stage] = absent_units;
                load<typename Traits::KTile>(context.tiles.k(k.stage), context.maps.k, k.full(), at);
                v.wait_empty();
                load<typename Traits::VTile>(context.tiles.v(v.stage), context.maps.v, v.full(), at);
            }
            __syncwarp();
            k.advance();
            v.advance();
        }
    }

private:
    // Of the tiles from `tile` on, each lane reads the place of a unit. A page that nobody sees is not read.
    __device__ __forceinline__ PageRow read(const KeyLocations& locations, int tile) const {
        const int lane = static_cast<int>(threadIdx.x % 32);
        const PrefixWorkTile& work_tile = context.storage.work_tile;
        const int key = work_tile.key_of(tile + lane / kUnits, Traits::kBlockN, lane % kUnits * kUnit);
        if (key + kUnit <= work_tile.first || key >= work_tile.last) return {hidden(), 0};
        const KeyLocation at = locations.of(key);
        return {static_cast<uint32_t>(at.page) < static_cast<uint32_t>(hidden()) ? at.page : absent(), at.row};
    }
    template <class Tile>
    __device__ __forceinline__ void load(uint32_t to, const CUtensorMap& map, const MBarrier& full,
                                         const PageRow (&at)[kUnits]) const {
        full.arrive_and_expect(Tile::kBytes);
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit)
                tma_load(to + chunk * Tile::kChunkBytes + unit * kUnit * 128, map, full, chunk * Tile::kChunkCols, at[unit].row,
                         context.storage.work_tile.head_k, at[unit].page);
    }
    __device__ __forceinline__ int hidden() const { return context.params.cache.pages; }      // no row sees its keys
    __device__ __forceinline__ int absent() const { return context.params.cache.pages + 1; }  // there is no such page
};

}  // namespace libflash::cuda::sm90
