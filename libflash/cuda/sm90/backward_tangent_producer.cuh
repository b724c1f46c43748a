// The producer of the sm_90a backward_tangent kernels: one thread loads the rows, then one tile of columns after another, by TMA.
#pragma once

#include "cuda/sm90/backward_tangent_storage.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardTangentProducer {
    using RowTile = typename Traits::RowTile;
    static constexpr bool kKeys = Traits::kKeys;
    static constexpr int kBlockN = Traits::kBlockN;

    const BackwardTangentContext<Traits>& context;

    __device__ __forceinline__ void run() const {
        if (threadIdx.x >= 32 || !elect_one()) return;
        const auto& work = context.storage.work_tile;
        PipelineState<Traits::kStages> columns(context.storage.columns);
        load_rows();
#pragma unroll 1
        for (auto at = work.first(); at.left > 0; work.advance(at)) {
            columns.wait_empty();
            load_columns(columns, at);
            columns.advance();
        }
    }

private:
    __device__ __forceinline__ void load_rows() const {
        const BackwardTangentParams& params = context.params;
        const TangentSideMaps& maps = context.maps.rows;
        const bool tfirst = (kKeys ? params.tk : params.tq).data, tsecond = (kKeys ? params.tv : params.tdout).data;
        const MBarrier full = PipelineState<1>(context.storage.rows).full();
        full.arrive_and_expect(Traits::kGroups * RowTile::kBytes * (2 + (tfirst ? 1 : 0) + (tsecond ? 1 : 0)));
        for (int group = 0; group < Traits::kGroups; ++group) {
            load_rows(0, group, maps.first, full);
            if (tfirst) load_rows(1, group, maps.tfirst, full);
            load_rows(2, group, maps.second, full);
            if (tsecond) load_rows(3, group, maps.tsecond, full);
        }
    }
    __device__ __forceinline__ void load_rows(int tensor, int group, const CUtensorMap& map, const MBarrier& full) const {
        const auto& work = context.storage.work_tile;
        RowTile::load(context.tiles.rows(tensor, group), map, full,
                      work.rows.start + work.first_row() + group * Traits::kGroupRows, work.at.head, work.at.batch);
    }

    __device__ __forceinline__ void load_columns(const PipelineState<Traits::kStages>& columns,
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
        load_columns<First>(first, maps.first, full, at);
        if (tfirst) load_columns<First>(first + kBlockN * 128, maps.tfirst, full, at);
        if constexpr (kKeys) load_statistics(columns.stage, full, at);
        load_columns<Second>(second, maps.second, full, at);
        if (tsecond) load_columns<Second>(second + kBlockN * 128, maps.tsecond, full, at);
    }
    template <class Tile>
    __device__ __forceinline__ void load_columns(uint32_t to, const CUtensorMap& map, const MBarrier& full,
                                                 const ColumnTilePosition& at) const {
        const auto& work = context.storage.work_tile;
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
            tma_load(to + chunk * Tile::kChunkBytes, map, full, chunk * Tile::kChunkCols, work.cols.start + at.tile * kBlockN,
                     at.head, work.at.batch);
    }
    __device__ __forceinline__ void load_statistics(int stage, const MBarrier& full, const ColumnTilePosition& at) const {
        const auto& work = context.storage.work_tile;
        const int64_t unit = QueryUnits::first(context.params, work.at.batch, at.head, work.cols.start);
        tma_load_bytes(context.tiles.statistics(stage), context.params.statistics + unit * kUnitRows + at.tile * kBlockN,
                       Traits::kStatisticsBytes, full);
    }
};

}  // namespace libflash::cuda::sm90
