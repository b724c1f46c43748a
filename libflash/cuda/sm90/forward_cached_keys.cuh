// Loads key tiles from a cache: by boxes of rows that lie in one page, all of whose keys have the same block table entry. A whole
// warp calls it. Each lane has one unit of a tile, and issues the box that begins with its unit.
#pragma once

#include "cuda/sm90/forward_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardCachedKeys {
    using WorkTile = ForwardWorkTile<Traits>;
    static constexpr int kBlockN = Traits::kBlockN;
    static constexpr int kUnit = 16, kUnits = kBlockN / kUnit;  // keys
    static_assert(kUnits <= 32 && kBlockN % kUnit == 0);

    const ForwardContext<Traits>& context;

    // The page or entry of the lane's unit, as the block table says; no_page() if no row of the work tile sees a key of its box.
    // A page that nobody sees is not read: it may belong to others, and its entry may be stale.
    __device__ __forceinline__ int page_of(const WorkTile& work_tile, int tile) const {
        const int box = tile * kBlockN + first_unit_of_box() * kUnit;
        const VisibleRange seen = work_tile.keys.seen_by_tile(work_tile.q_rows.length);
        if (unit() >= kUnits || box + context.maps.box_rows <= seen.begin || box >= seen.end) return no_page();
        const KeyLocations locations(context.params.cache, work_tile.batch());
        return locations.of(box).page;
    }
    // The units of a tile that somebody sees, but whose page does not exist: a bit for each. Their keys are absent.
    __device__ __forceinline__ uint32_t absent_units(int page) const {
        return __ballot_sync(0xffffffffu, page != no_page() && !exists(page));
    }

    // `Tile`: KTile or VTile. After the barrier was told to expect the bytes of the tile. Zeros take the place of pages that do
    // not exist or that nobody sees, because their coordinate is outside the tensor.
    template <class Tile>
    __device__ __forceinline__ void load(uint32_t to, const CUtensorMap& map, const MBarrier& barrier, const WorkTile& work_tile,
                                         int tile, int page) const {
        if (unit() >= kUnits || unit() != first_unit_of_box()) return;
        const int key = tile * kBlockN + unit() * kUnit, row = row_of(key), at = exists(page) ? page : context.params.cache.pages;
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
            tma_load(to + chunk * Tile::kChunkBytes + unit() * kUnit * 128, map, barrier, chunk * Tile::kChunkCols, row,
                     work_tile.kv_head, at);
    }

private:
    __device__ __forceinline__ static int unit() { return static_cast<int>(threadIdx.x % 32); }
    // Boxes have a power of two of rows.
    __device__ __forceinline__ int first_unit_of_box() const { return unit() & -(context.maps.box_rows / kUnit); }
    // Not a page that exists, and not the number of pages.
    __device__ __forceinline__ static int no_page() { return INT32_MIN; }
    __device__ __forceinline__ bool exists(int page) const {
        return static_cast<uint32_t>(page) < static_cast<uint32_t>(context.params.cache.pages);
    }
    __device__ __forceinline__ int row_of(int key) const {
        const CacheParams& cache = context.params.cache;
        return cache.table ? key - divide(key, cache.page_size) * static_cast<int>(cache.page_size.divisor) : key;
    }
};

}  // namespace libflash::cuda::sm90
