// Where the keys of a work tile are in the cache, for the producers of the sm_90a decode kernels: for each unit of 16 keys, its
// page (or entry) and its row there. A whole warp reads the block table entries of several tiles at once.
#pragma once

#include "cuda/sm90/cluster_pair.cuh"
#include "cuda/sm90/decode_work_tile.cuh"

namespace libflash::cuda::sm90 {

template <int kBlockN>
struct DecodePages {
    static constexpr int kUnit = 16, kUnits = kBlockN / kUnit, kTilesAtOnce = 32 / kUnits;

    const CacheParams& cache;
    const DecodeWorkTile& work_tile;
    const int box_rows;  // keys of a box: a power of two and a multiple of kUnit; at most kBlockN

    // Of a unit: its page (or entry), and the row in it of the first key of the unit's box. `page` may also be hidden() or
    // absent(), which are outside the tensor, so that TMA writes zeros.
    struct PageRow {
        int page, row;
    };
    // The pages and rows of all units of a tile, in every lane; absent_units: a bit for each unit whose page does not exist.
    struct OfTile {
        int page[kUnits], row[kUnits];
        uint32_t absent_units;
    };

    // Each lane reads the page and row of one unit of the tiles from `tile` on. A page that no row sees is not read: it may
    // belong to another sequence, and its block table entry may be stale.
    __device__ __forceinline__ PageRow read(const KeyLocations& locations, int tile) const {
        const int box_units = box_rows / kUnit,
                  box = work_tile.begin + (tile + lane() / kUnits) * kBlockN + (lane() % kUnits & -box_units) * kUnit;
        if (box + box_rows <= work_tile.first || box >= work_tile.last) return {hidden(), 0};
        const KeyLocation at = locations.of(box);
        return {static_cast<uint32_t>(at.page) < static_cast<uint32_t>(hidden()) ? at.page : absent(), at.row};
    }
    __device__ __forceinline__ OfTile of_tile(const PageRow& pages, int tile) const {
        OfTile found;
        const int first_lane = tile % kTilesAtOnce * kUnits;
        found.absent_units = 0;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            found.page[unit] = __shfl_sync(0xffffffffu, pages.page, first_lane + unit);
            found.row[unit] = __shfl_sync(0xffffffffu, pages.row, first_lane + unit);
            if (found.page[unit] == absent()) found.absent_units |= 1u << unit;
        }
        return found;
    }
    // Called by one thread. Loads one chunk (128 bytes of each row) of a tile, from column `column` on; kForPair: for both thread
    // blocks of a pair.
    template <bool kForPair = false>
    __device__ __forceinline__ void load_chunk(uint32_t to, const CUtensorMap& map, const MBarrier& full, int column,
                                               const OfTile& at) const {
        const int box_units = box_rows / kUnit;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
            if ((unit & (box_units - 1)) == 0)  // a division would take longer than issuing the load
                load_box<kForPair>(to + unit * kUnit * 128, map, full, column, at.row[unit], at.page[unit]);
    }

private:
    template <bool kForPair>
    __device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, const MBarrier& full, int column, int row,
                                             int page) const {
        if constexpr (kForPair) {
            tma_load_to(kBothOfPair, to, map, full, column, row, work_tile.rows.head_k, page);
        } else {
            tma_load(to, map, full, column, row, work_tile.rows.head_k, page);
        }
    }
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
    __device__ __forceinline__ int hidden() const { return cache.pages; }      // the split has no key of the box
    __device__ __forceinline__ int absent() const { return cache.pages + 1; }  // there is no such page
};

}  // namespace libflash::cuda::sm90
