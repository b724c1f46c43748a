// The producer warp of the sm_90a decode kernel: loads key tiles from the cache by TMA, in boxes of rows that lie in one page.
// Its lanes read the block table entries of several tiles at once, one for every 16 keys, and those of the next tiles early.
#pragma once

#include "cuda/sm90/decode_shared_storage.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodeProducer {
    using KTile = typename Traits::KTile;
    static constexpr int kBlockN = Traits::kBlockN, kUnit = 16, kUnits = kBlockN / kUnit, kTilesAtOnce = 32 / kUnits;

    const DecodeContext<Traits>& context;

    // Of a unit: its page or entry, and the row there of the first key of its box. Instead of a page: hidden() or absent(), which
    // are outside the tensor, so that TMA writes zeros.
    struct PageRow {
        int page, row;
    };

    __device__ __forceinline__ void run() const {
        if (threadIdx.x >= 32) return;
        const bool leader = elect_one();
        const DecodeWorkTile& work_tile = context.storage.work_tile;
        const KeyLocations locations(context.params.cache, work_tile.rows.batch);
        PageRow pages{}, next = read_pages(locations, 0);
#pragma unroll 1
        for (int tile = 0; tile < work_tile.tiles; ++tile) {
            if (tile % kTilesAtOnce == 0) pages = next, next = read_pages(locations, tile + kTilesAtOnce);
            load(tile, pages, leader);
        }
    }

private:
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
    __device__ __forceinline__ int hidden() const { return context.params.cache.pages; }      // the split has no key of the box
    __device__ __forceinline__ int absent() const { return context.params.cache.pages + 1; }  // there is no such page

    // Of the tiles from `tile` on, each lane reads the page and row of a unit. A page that nobody sees is not read: it may belong
    // to others, and its entry may be stale.
    __device__ __forceinline__ PageRow read_pages(const KeyLocations& locations, int tile) const {
        const DecodeWorkTile& work_tile = context.storage.work_tile;
        const int box_units = context.maps.box_rows / kUnit,
                  box = work_tile.begin + (tile + lane() / kUnits) * kBlockN + (lane() % kUnits & -box_units) * kUnit;
        if (box + context.maps.box_rows <= work_tile.first || box >= work_tile.last) return {hidden(), 0};
        const KeyLocation at = locations.of(box);
        return {static_cast<uint32_t>(at.page) < static_cast<uint32_t>(hidden()) ? at.page : absent(), at.row};
    }

    __device__ __forceinline__ void load(int tile, const PageRow& pages, bool leader) const {
        int page[kUnits], row[kUnits];
        const int first_lane = tile % kTilesAtOnce * kUnits;
        uint32_t absent_units = 0;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            page[unit] = __shfl_sync(0xffffffffu, pages.page, first_lane + unit);
            row[unit] = __shfl_sync(0xffffffffu, pages.row, first_lane + unit);
            if (page[unit] == absent()) absent_units |= 1u << unit;
        }
        if (leader) load_chunks(tile, page, row, absent_units);
        __syncwarp();
    }
    // One thread. `absent` is written when its reader has released the values of the tile before.
    __device__ __forceinline__ void load_chunks(int tile, const int (&page)[kUnits], const int (&row)[kUnits],
                                                uint32_t absent_units) const {
        const int stage = tile % Traits::kStages, group = stage;
        const uint32_t parity = static_cast<uint32_t>(tile / Traits::kStages) & 1;
#pragma unroll 1
        for (int n = 0; n < Traits::kChunks; ++n) {
            const int chunk = Traits::chunk_in_order(n, group);
            if (n == 0 || (n - Traits::kScoreChunks) % Traits::kPartChunks == 0)
                context.storage.empty_of(stage, Traits::part_of_chunk(chunk)).wait(parity ^ 1);
            if (n == Traits::kScoreChunks) context.storage.absent[stage] = absent_units;
            const MBarrier full = context.storage.full_of(stage, chunk);
            full.arrive_and_expect(KTile::kChunkBytes);
            const uint32_t to = context.tiles.k(stage) + chunk * KTile::kChunkBytes;
            const int head = context.storage.work_tile.rows.head_k, box_units = context.maps.box_rows / kUnit;
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit)
                if (unit % box_units == 0)
                    tma_load(to + unit * kUnit * 128, context.maps.k, full, chunk * KTile::kChunkCols, row[unit], head,
                             page[unit]);
        }
    }
};

}  // namespace libflash::cuda::sm90
