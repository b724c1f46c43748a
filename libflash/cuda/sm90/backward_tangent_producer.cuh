// The producer warp of the sm_90a backward_tangent kernels finds work tiles, and loads the rows of each, then one tile of columns
// after another, by TMA.
#pragma once

#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/sm90/backward_tangent_storage.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardTangentProducer {
    using RowTile = typename Traits::RowTile;
    using WorkTile = BackwardTangentWorkTile<Traits>;
    using First = typename Traits::ColTile;
    using Second = typename Traits::SecondColTile;
    static constexpr bool kKeys = Traits::kKeys;
    static constexpr int kBlockN = Traits::kBlockN;

    const BackwardTangentContext<Traits>& context;

    __device__ __forceinline__ void run() const {
        if (threadIdx.x >= 32) return;
        const bool leader = elect_one();
        State p{PipelineState<1>(context.storage.rows), PipelineState<Traits::kStages>(context.storage.columns),
                PipelineState<Traits::kStages>(context.storage.second_columns)};
        BackwardTangentSchedule<Traits> schedule;
        if constexpr (Traits::kWide) {  // without a loop the compiler keeps less in registers
            const TileCoordinates work = schedule.find(context.params);
            if (leader && work.batch >= 0) load_work_tile(p, work);
            if (leader) load_work_tile(p, {-1, 0, 0});
            return;
        }
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
        PipelineState<Traits::kStages> columns, second;  // second: kWide
    };

    // Announces a work tile to the consumers, which wait for the rows, and loads it.
    __device__ __forceinline__ void load_work_tile(State& p, const TileCoordinates& found) const {
        WorkTile& work = context.storage.work_tiles[p.rows.phase];
        p.rows.wait_empty();
        work.init(context.params, found);
        if (work.is_end()) return p.rows.full().arrive();
        load_rows(work, p.rows.full());
        p.rows.advance();
        if constexpr (Traits::kWide) {
            load_wide_columns(p, work);
        } else {
            load_joint_columns(p, work);
        }
    }
    __device__ __forceinline__ void load_joint_columns(State& p, const WorkTile& work) const {
#pragma unroll 1
        for (auto at = work.first(); at.left > 0; work.advance(at)) {
            p.columns.wait_empty();
            const MBarrier full = p.columns.full();
            full.arrive_and_expect(first_bytes() + second_bytes());
            load_first_columns(work, p.columns.stage, full, at);
            load_second_columns(work, p.columns.stage, full, at);
            p.columns.advance();
        }
    }
    __device__ __forceinline__ void load_wide_columns(State& p, const WorkTile& work) const {
        if constexpr (Traits::kDifferences && Traits::kSecondStages == 1) {
            // A consumer releases the second tensor of a tile only after it has received the first tensor of the same tile. So
            // that first tensor must be loaded before the second tensor of the next tile.
#pragma unroll 1
            for (auto at = work.first(); at.left > 0; work.advance(at)) {
                p.second.stage = p.columns.stage, p.second.phase = p.columns.phase;
                load_tile_of_second(p, work, at);
                load_tile_of_first(p, work, at);
            }
        } else {
            load_ahead(p, work);
        }
    }
    // The tensor that a consumer needs first, and releases first, is one tile ahead.
    __device__ __forceinline__ void load_ahead(State& p, const WorkTile& work) const {
        auto at = work.first(), ahead = at;
        const auto load_next = [&](ColumnTilePosition& position, bool second) {
            if (position.left == 0) return;
            second ? load_tile_of_second(p, work, position) : load_tile_of_first(p, work, position);
            work.advance(position);
        };
        load_next(ahead, Traits::kDifferences);
#pragma unroll 1
        while (at.left > 0) {
            load_next(ahead, Traits::kDifferences);
            load_next(at, !Traits::kDifferences);
        }
    }
    __device__ __forceinline__ void load_tile_of_first(State& p, const WorkTile& work, const ColumnTilePosition& at) const {
        p.columns.wait_empty();
        p.columns.full().arrive_and_expect(first_bytes());
        load_first_columns(work, p.columns.stage, p.columns.full(), at);
        p.columns.advance();
    }
    __device__ __forceinline__ void load_tile_of_second(State& p, const WorkTile& work, const ColumnTilePosition& at) const {
        // With memory for only one tile, the previous tile, which has the other stage, must have been released.
        if constexpr (Traits::kSecondStages == 1) {
            p.second.empty_of(p.second.stage ^ 1).wait(p.second.stage == 1 ? p.second.phase : p.second.phase ^ 1);
        } else {
            p.second.wait_empty();
        }
        p.second.full().arrive_and_expect(second_bytes());
        load_second_columns(work, p.second.stage, p.second.full(), at);
        p.second.advance();
    }
    __device__ __forceinline__ void load_rows(const WorkTile& work, const MBarrier& full) const {
        const BackwardTangentParams& params = context.params;
        const TangentSideMaps& maps = context.maps.rows;
        constexpr bool kSecond = Traits::kRowTiles > 2;
        const bool tfirst = (kKeys ? params.tk : params.tq).data, tsecond = kSecond && (kKeys ? params.tv : params.tdout).data;
        full.arrive_and_expect(Traits::kGroups * RowTile::kBytes * (kSecond + 1 + (tfirst ? 1 : 0) + (tsecond ? 1 : 0)));
        for (int group = 0; group < Traits::kGroups; ++group) {
            load_rows(work, 0, group, maps.first, full);
            if (tfirst) load_rows(work, 1, group, maps.tfirst, full);
            if (kSecond) load_rows(work, 2, group, maps.second, full);
            if (tsecond) load_rows(work, 3, group, maps.tsecond, full);
        }
    }
    __device__ __forceinline__ void load_rows(const WorkTile& work, int tensor, int group, const CUtensorMap& map,
                                              const MBarrier& full) const {
        RowTile::load(anew(context.tiles.rows(tensor, group)), map, full,
                      work.rows.start + work.first_row() + group * Traits::kGroupRows, work.at.head, work.at.batch);
    }

    // Keeps the compiler from storing the address, and all addresses that it computes from it, in registers.
    __device__ static __forceinline__ uint32_t anew(uint32_t address) {
        return Traits::kWide ? static_cast<uint32_t>(hide_from_compiler(static_cast<int>(address))) : address;
    }
    __device__ __forceinline__ bool has_first_tangents() const { return (kKeys ? context.params.tq : context.params.tk).data; }
    __device__ __forceinline__ bool has_second_tangents() const {
        return Traits::kMovingCols && (kKeys ? context.params.tdout : context.params.tv).data;
    }
    __device__ __forceinline__ int first_bytes() const {
        return First::kBytes / 2 * (has_first_tangents() ? 2 : 1) + Traits::kStatisticsBytes;
    }
    __device__ __forceinline__ int second_bytes() const {
        return Second::kBytes / (Traits::kMovingCols ? 2 : 1) * (has_second_tangents() ? 2 : 1);
    }
    __device__ __forceinline__ void load_first_columns(const WorkTile& work, int stage, const MBarrier& full,
                                                       const ColumnTilePosition& at) const {
        const uint32_t cols = anew(context.tiles.first_cols(stage));
        load_columns<First>(work, cols, context.maps.cols.first, full, at);
        if (has_first_tangents()) load_columns<First>(work, cols + kBlockN * 128, context.maps.cols.tfirst, full, at);
        if constexpr (kKeys) load_statistics(work, stage, full, at);
    }
    __device__ __forceinline__ void load_second_columns(const WorkTile& work, int stage, const MBarrier& full,
                                                        const ColumnTilePosition& at) const {
        const uint32_t cols = anew(context.tiles.second_cols(stage));
        load_columns<Second>(work, cols, context.maps.cols.second, full, at);
        if (has_second_tangents()) load_columns<Second>(work, cols + kBlockN * 128, context.maps.cols.tsecond, full, at);
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
        const int64_t unit = QueryUnits::first(context.params, at.head, work.units_before);
        tma_load_bytes(anew(context.tiles.statistics(stage)), context.params.statistics + unit * kUnitRows + at.tile * kBlockN,
                       Traits::kStatisticsBytes, full);
    }
};

}  // namespace libflash::cuda::sm90
