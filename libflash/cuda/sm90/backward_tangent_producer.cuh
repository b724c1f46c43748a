// The producer warp of the sm_90a backward_tangent kernels finds work tiles, and loads the rows of each, then one tile of columns
// after another, by TMA.
#pragma once

#include "cuda/sm90/backward_tangent_storage.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardTangentProducer {
    using RowTile = typename Traits::RowTile;
    using WorkTile = BackwardTangentWorkTile<Traits>;
    static constexpr bool kKeys = Traits::kKeys;
    static constexpr int kBlockN = Traits::kBlockN;

    const BackwardTangentContext<Traits>& context;

    __device__ __forceinline__ void run() const {
        if (threadIdx.x >= 32) return;
        const bool leader = elect_one();
        State p{PipelineState<1>(context.storage.rows), PipelineState<Traits::kStages>(context.storage.columns)};
        BackwardTangentSchedule<Traits> schedule;
        bool more = true;
#pragma unroll 1
        while (more) {
            const TileCoordinates work = schedule.find(context.params);
            more = work.batch >= 0;
            if (leader) load_work_tile(p, work);
            __syncwarp();
        }
    }

private:
    struct State {
        PipelineState<1> rows;
        PipelineState<Traits::kStages> columns;
    };

    // Announces a work tile to the consumers, which wait for the rows, and loads it.
    __device__ __forceinline__ void load_work_tile(State& p, const TileCoordinates& found) const {
        WorkTile& work = context.storage.work_tiles[p.rows.phase];
        p.rows.wait_empty();
        work.init(context.params, found);
        if (work.is_end()) return p.rows.full().arrive();
        load_rows(work, p.rows.full());
        p.rows.advance();
#pragma unroll 1
        for (auto at = work.first(); at.left > 0; work.advance(at)) {
            p.columns.wait_empty();
            load_columns(work, p.columns, at);
            p.columns.advance();
        }
    }
    __device__ __forceinline__ void load_rows(const WorkTile& work, const MBarrier& full) const {
        const BackwardTangentParams& params = context.params;
        const TangentSideMaps& maps = context.maps.rows;
        const bool tfirst = (kKeys ? params.tk : params.tq).data, tsecond = (kKeys ? params.tv : params.tdout).data;
        full.arrive_and_expect(Traits::kGroups * RowTile::kBytes * (2 + (tfirst ? 1 : 0) + (tsecond ? 1 : 0)));
        for (int group = 0; group < Traits::kGroups; ++group) {
            load_rows(work, 0, group, maps.first, full);
            if (tfirst) load_rows(work, 1, group, maps.tfirst, full);
            load_rows(work, 2, group, maps.second, full);
            if (tsecond) load_rows(work, 3, group, maps.tsecond, full);
        }
    }
    __device__ __forceinline__ void load_rows(const WorkTile& work, int tensor, int group, const CUtensorMap& map,
                                              const MBarrier& full) const {
        RowTile::load(context.tiles.rows(tensor, group), map, full,
                      work.rows.start + work.first_row() + group * Traits::kGroupRows, work.at.head, work.at.batch);
    }

    __device__ __forceinline__ void load_columns(const WorkTile& work, const PipelineState<Traits::kStages>& columns,
                                                 const ColumnTilePosition& at) const {
        using First = typename Traits::ColTile;
        using Second = typename Traits::SecondColTile;
        constexpr int kFirstBytes = First::kBytes / 2, kSecondBytes = Second::kBytes / (Traits::kMovingCols ? 2 : 1);
        const BackwardTangentParams& params = context.params;
        const TangentSideMaps& maps = context.maps.cols;
        const bool tfirst = (kKeys ? params.tq : params.tk).data,
                   tsecond = Traits::kMovingCols && (kKeys ? params.tdout : params.tv).data;
        const MBarrier full = columns.full();
        full.arrive_and_expect(kFirstBytes * (tfirst ? 2 : 1) + kSecondBytes * (tsecond ? 2 : 1) + Traits::kStatisticsBytes);
        const uint32_t first = context.tiles.first_cols(columns.stage), second = context.tiles.second_cols(columns.stage);
        load_columns<First>(work, first, maps.first, full, at);
        if (tfirst) load_columns<First>(work, first + kBlockN * 128, maps.tfirst, full, at);
        if constexpr (kKeys) load_statistics(work, columns.stage, full, at);
        load_columns<Second>(work, second, maps.second, full, at);
        if (tsecond) load_columns<Second>(work, second + kBlockN * 128, maps.tsecond, full, at);
    }
    template <class Tile>
    __device__ __forceinline__ void load_columns(const WorkTile& work, uint32_t to, const CUtensorMap& map, const MBarrier& full,
                                                 const ColumnTilePosition& at) const {
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
            tma_load(to + chunk * Tile::kChunkBytes, map, full, chunk * Tile::kChunkCols, work.cols.start + at.tile * kBlockN,
                     at.head, work.at.batch);
    }
    __device__ __forceinline__ void load_statistics(const WorkTile& work, int stage, const MBarrier& full,
                                                    const ColumnTilePosition& at) const {
        const int64_t unit = QueryUnits::first(context.params, work.at.batch, at.head, work.cols.start);
        tma_load_bytes(context.tiles.statistics(stage), context.params.statistics + unit * kUnitRows + at.tile * kBlockN,
                       Traits::kStatisticsBytes, full);
    }
};

}  // namespace libflash::cuda::sm90
