// Loads key tiles from a cache. The rows of a TMA box lie in one page, so they have the same block table entry. A whole warp
// calls these functions; one lane issues the loads. The warp reads the block table entries of several tiles at once, one lane for
// every 16 keys, because it must wait for them.
#pragma once

#include "cuda/sm90/block_pair.cuh"
#include "cuda/sm90/forward_context.cuh"
#include "cuda/sm90/forward_instance.h"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardCachedKeys {
    using WorkTile = ForwardWorkTile<Traits>;
    static constexpr int kBlockN = Traits::kBlockN;
    static constexpr int kUnit = kCachedUnit, kUnits = kBlockN / kUnit;  // keys
    static_assert(kUnits <= 32 && kBlockN % kUnit == 0);
    static constexpr int kTilesAtOnce = 32 / kUnits;

    const ForwardContext<Traits>& context;

    // Of a unit: its page (or cache entry), and the row in it of the first key of the unit's box. `page` may also be hidden() or
    // absent(), which are outside the tensor, so that TMA writes zeros.
    struct PageRow {
        int page, row;
    };

    // Each lane reads the page and row of one unit of the tiles from `tile` down to tile - kTilesAtOnce + 1. A page that no row
    // sees is not read: it may belong to another sequence, and its block table entry may be stale.
    __device__ __forceinline__ PageRow read_pages(const WorkTile& work_tile, int tile) const {
        const int back = lane() / kUnits, box_units = context.maps.box_rows / kUnit,  // a power of two
            box = (tile - back) * kBlockN + (lane() % kUnits & -box_units) * kUnit;
        const VisibleRange seen = work_tile.keys.seen_by_tile(work_tile.q_rows.length);
        if (back >= kTilesAtOnce || box + context.maps.box_rows <= seen.begin || box >= seen.end) return {hidden(), 0};
        const KeyLocations locations(context.params.cache, work_tile.batch());
        const KeyLocation at = locations.of(box);
        return {static_cast<uint32_t>(at.page) < static_cast<uint32_t>(hidden()) ? at.page : absent(), at.row};
    }
    // The pages and rows of the tile that is `back` tiles before the first tile of `pages`, in the first kUnits lanes.
    __device__ __forceinline__ PageRow of_tile(const PageRow& pages, int back) const {
        const int from = back * kUnits + lane() % kUnits;
        return {__shfl_sync(0xffffffffu, pages.page, from), __shfl_sync(0xffffffffu, pages.row, from)};
    }
    // A bit for each unit of a tile that some row sees but whose page does not exist. The keys of these units are absent.
    __device__ __forceinline__ uint32_t absent_units(const PageRow& at) const {
        return __ballot_sync(0xffffffffu, lane() < kUnits && at.page == absent());
    }

    // `Tile`: KTile or VTile; `at`: from of_tile(). The barrier must already expect the bytes of the tile. `can_share`: whether
    // thread blocks of a pair load a half of the boxes each, for both.
    template <class Tile>
    __device__ __forceinline__ void load(bool leader, uint32_t to, const CUtensorMap& map, const MBarrier& barrier,
                                         const WorkTile& work_tile, const PageRow& at, bool can_share) const {
        const int box_units = context.maps.box_rows / kUnit, kv_head = work_tile.kv_head;
        const bool shared = can_share && Traits::kPairs && context.params.in_pairs && !work_tile.exact_maximum;
        const int first = shared ? rank_of_pair(context.params.in_pairs) : 0, step = shared ? 2 : 1;  // boxes
#pragma unroll 2
        for (int unit = first * box_units; unit < kUnits; unit += step * box_units) {
            const int page = __shfl_sync(0xffffffffu, at.page, unit), row = __shfl_sync(0xffffffffu, at.row, unit);
            if (!leader) continue;
#pragma unroll
            for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
                const uint32_t box = to + chunk * Tile::kChunkBytes + unit * kUnit * 128;
                if (shared) {
                    tma_load_to(kBothOfPair, box, map, barrier, chunk * Tile::kChunkCols, row, kv_head, page);
                } else {
                    tma_load(box, map, barrier, chunk * Tile::kChunkCols, row, kv_head, page);
                }
            }
        }
    }

private:
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
    __device__ __forceinline__ int hidden() const { return context.params.cache.pages; }  // no row of the work tile sees the box
    __device__ __forceinline__ int absent() const { return context.params.cache.pages + 1; }  // there is no such page
};

}  // namespace libflash::cuda::sm90
