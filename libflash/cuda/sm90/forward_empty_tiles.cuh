// The warp of the sm_90a forward kernel that writes the work tiles that see no key. It iterates over the schedule independently;
// the scheduler warp skips these work tiles.
#pragma once

#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/forward_output_rows.cuh"
#include "cuda/sm90/forward_tile_scheduler.cuh"
#include "cuda/sm90/online_softmax.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardEmptyTilesWarp {
    using WorkTile = ForwardWorkTile<Traits>;

    const ForwardContext<Traits>& context;
    const ForwardTileScheduler<Traits> scheduler{context};
    const ForwardOutputRows<Traits> rows{context};

    __device__ __forceinline__ void run() const {
        wait_for_previous_kernel();
        if constexpr (Traits::kDynamic) {
            if (scheduler.is_dynamic()) return write_tiles_of_units();
        }
        ScheduleCursor cursor = scheduler.begin();
        TileAssignment assignment;
        while (scheduler.next_static(cursor, assignment)) write_if_empty(assignment);
    }

private:
    __device__ __forceinline__ void write_tiles_of_units() const {
        const int units = SequenceOrder(context.params).units(), blocks = scheduler.blocks();
        for (int unit = scheduler.block(); unit < units; unit += blocks) write_if_empty({scheduler.tile_of_unit(unit), unit, 0});
    }
    __device__ __forceinline__ void write_if_empty(const TileAssignment& assignment) const {
        WorkTile work_tile;
        work_tile.init(context.params, assignment, false);
        if (!work_tile.has_keys()) write_zeros(work_tile);
    }
    __device__ __forceinline__ void write_zeros(const WorkTile& work_tile) const {
        const int end = min(work_tile.keys.first_row + Traits::kBlockM, work_tile.q_rows.owned);
        for (int row = work_tile.keys.first_row + static_cast<int>(threadIdx.x % 32); row < end; row += 32) {
            rows.finish_row(work_tile, row - work_tile.keys.first_row, row < work_tile.q_rows.length, kNoScore, 0.0f, true);
            if constexpr (Traits::kStatistics) rows.write_no_statistics(work_tile, row - work_tile.keys.first_row);
            for (int col = 0; col < Traits::kHeadDimV; col += 8)
                rows.write_eight(rows.address(work_tile, row), col, make_uint4(0, 0, 0, 0));
        }
    }
};

}  // namespace libflash::cuda::sm90
