// Two warps of the sm_90a forward_tangent kernel for more than 128 channels load by TMA: one announces work tiles to the
// consumers and loads Q and tQ, the other one K, V and their tangents. Both find the same work tiles, and neither waits for the
// other.
#pragma once

#include "cuda/sm90/forward_tangent_wide_storage.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardTangentWideProducer {
    using Storage = ForwardTangentWideStorage<Traits>;
    using WorkTile = ForwardTangentWorkTile<Traits>;
    using QTile = typename Traits::QTile;
    using UnitTile = typename Traits::UnitTile;
    using Units = PipelineState<Traits::kUnits>;

    const ForwardTangentWideContext<Traits>& context;

    __device__ __forceinline__ void run() const {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (warp == 0) load_queries_of_all();
        if (warp == 1) load_units_of_all();
    }

private:
    __device__ __forceinline__ void load_queries_of_all() const {
        const bool leader = elect_one();
        ForwardTangentSchedule<Traits> schedule;
        int slot = 0;
        uint32_t phase = 0;
        bool more = true;
#pragma unroll 1
        while (more) {
            const TileCoordinates work = schedule.find(context.params);
            more = work.batch >= 0;
            if (leader) {
                WorkTile& work_tile = context.storage.work_tiles[slot];
                work_tile.init(context.params, work);
#pragma unroll 1
                for (int group = 0; group < Traits::kGroups; ++group) load_queries(work_tile, group, phase);
            }
            __syncwarp();
            slot = Storage::next_slot(slot);
            phase ^= 1;
        }
    }
    // Announces a work tile to a warpgroup, which waits for Q.
    __device__ __forceinline__ void load_queries(const WorkTile& work_tile, int group, uint32_t phase) const {
        const PipelineState<1> q(context.storage.q[group], 0, phase);
        q.wait_empty();
        if (work_tile.is_end() || !work_tile.has_keys()) return q.full().arrive();
        const int chunks = key_units<Traits>(context.params),
                  row = work_tile.q_rows.start + work_tile.keys.first_row + group * Traits::kGroupRows;
        q.full().arrive_and_expect(2 * chunks * QTile::kChunkBytes);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const uint32_t to = context.tiles.q(group) + chunk * QTile::kChunkBytes;
            const int col = chunk * QTile::kChunkCols;
            tma_load(to, context.maps.q, q.full(), col, row, work_tile.at.head, work_tile.at.batch);
            tma_load(to + QTile::kBytes, context.maps.tq, q.full(), col, row, work_tile.at.head,
                     batch_of(context.params.tq, work_tile.at.batch));
        }
    }
    // An absent tangent is zero, which is what TMA writes for a batch that does not exist. Products without branches are faster.
    __device__ __forceinline__ int batch_of(const RowsParams& tangent, int batch) const {
        return tangent.data ? batch : context.params.batch;
    }

    __device__ __forceinline__ void load_units_of_all() const {
        const bool leader = elect_one();
        Units units(context.storage.units);
        ForwardTangentSchedule<Traits> schedule;
#pragma unroll 1
        while (true) {
            const TileCoordinates work = schedule.find(context.params);
            if (work.batch < 0) return;
            if (leader) load_units_of(units, work);
            __syncwarp();
        }
    }
    // Tiles from the last one to the first; of each K and tK, then V and tV.
    __device__ __forceinline__ void load_units_of(Units& units, const TileCoordinates& work) const {
        WorkTile work_tile;
        work_tile.init(context.params, work);
        const int keys = key_units<Traits>(context.params);
#pragma unroll 1
        for (int tile = work_tile.keys.end - 1; tile >= work_tile.keys.begin; --tile) {
            const int row = work_tile.key_row(tile);
#pragma unroll 1
            for (int unit = 0; unit < keys; ++unit)
                load_unit(units, unit, row, work_tile.kv_head, work.batch, context.maps.k, context.maps.tk, context.params.tk);
#pragma unroll 1
            for (int unit = 0; unit < Traits::kValueUnits; ++unit)
                load_unit(units, unit, row, work_tile.kv_head, work.batch, context.maps.v, context.maps.tv, context.params.tv);
        }
    }
    __device__ __forceinline__ void load_unit(Units& units, int unit, int row, int head, int batch, const CUtensorMap& map,
                                              const CUtensorMap& tangent_map, const RowsParams& tangent) const {
        const uint32_t to = context.tiles.unit(units.stage);
        const int col = unit * UnitTile::kChunkCols;
        units.wait_empty();
        units.full().arrive_and_expect(Traits::kUnitBytes);
        tma_load(to, map, units.full(), col, row, head, batch);
        tma_load(to + context.tiles.kTangents, tangent_map, units.full(), col, row, head, batch_of(tangent, batch));
        units.advance();
    }
};

}  // namespace libflash::cuda::sm90
