// What the sm_90a forward kernel writes from registers: the LSE of a row, eight channels of a row, and work tiles that see no
// key.
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/forward_work.cuh"
#include "cuda/sm90/online_softmax.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel, ForwardInstance kInstance>
struct ForwardEpilogue : ForwardWork<Kernel, kInstance> {
    using Base = ForwardWork<Kernel, kInstance>;
    using Base::Base, Base::params, Base::kDynamic, Base::dynamic_schedule, Base::next_static_work, Base::tile_of_order,
        Base::fill, Base::first_cursor, Base::kBlockM, Base::kGeneral, Base::kHeadDimV, Base::owned_of, Base::start_of;
    using typename Base::WorkTile, typename Base::ScheduleCursor, typename Base::T, typename Base::Assignment;

    // Writes the LSE of row `place` of the work tile, with the sink if there is one. Returns the factor for the row's sum of P V;
    // 0 if the row sees no key, or if it does not count (`counts` is false), because it is beyond the used length.
    __device__ __forceinline__ float finish_row(const WorkTile& work_tile, int place, bool counts, float base, float sum,
                                                bool write) const {
        float largest = base, factor = 1.0f;
        if (params.sink.data) {
            const float sink = head_number<T>(params.sink, work_tile.work.batch, work_tile.work.head) * kLog2e;
            largest = fmaxf(base, sink);
            factor = exp2_approx(base - largest);
            sum = sum * factor + exp2_approx(sink - largest);
        }
        const bool sees_keys = counts && sum != 0.0f;
        if (work_tile.lse && write && place < owned_of(work_tile) - work_tile.keys.first_row)
            work_tile.lse[place * params.lse.row] = sees_keys ? (largest + __log2f(sum)) * kLn2 : -INFINITY;
        if constexpr (kGeneral) factor *= params.rare.dropout.keep_factor;
        // A row with NaN stays NaN: a NaN sum is not equal to 0, and its reciprocal is NaN.
        return sees_keys ? __fdividef(factor, sum) : 0.0f;
    }

    // nullptr if the row does not exist.
    __device__ __forceinline__ T* row_of_out(const WorkTile& work_tile, int row) const {
        if (row >= owned_of(work_tile)) return nullptr;
        return static_cast<T*>(params.out.data) + work_tile.work.batch * params.out.batch +
               work_tile.work.head * params.out.head + (start_of(work_tile) + row) * params.out.row;
    }

    __device__ __forceinline__ void write_eight(T* row, int col, const uint4& eight) const {
        if (row && col < params.head_dim_v) *reinterpret_cast<uint4*>(row + col) = eight;
    }

    // Executed by one warp of the producer warpgroup: writes the work tiles that see no key, which the scheduler warp skips.
    __device__ __forceinline__ void write_empty_work_tiles() const {
        wait_for_previous_kernel();
        if constexpr (kDynamic) {
            if (dynamic_schedule()) return write_empty_tiles();
        }
        ScheduleCursor rounds = first_cursor();
        Assignment turn;
        while (next_static_work(rounds, turn)) write_if_empty(turn);
    }
    __device__ __forceinline__ void write_empty_tiles() const {
        const int units = SequenceOrder(params).units();
        for (int unit = blockIdx.x; unit < units; unit += gridDim.x) write_if_empty({tile_of_order(unit), unit, 0});
    }
    __device__ __forceinline__ void write_if_empty(const Assignment& turn) const {
        WorkTile work_tile;
        fill(work_tile, turn, false);
        if (work_tile.keys.begin == work_tile.keys.end) write_nothing(work_tile);
    }

    __device__ __forceinline__ void write_nothing(const WorkTile& work_tile) const {
        const int end = min(work_tile.keys.first_row + kBlockM, work_tile.q_rows.owned);
        for (int row = work_tile.keys.first_row + static_cast<int>(threadIdx.x % 32); row < end; row += 32) {
            finish_row(work_tile, row - work_tile.keys.first_row, row < work_tile.q_rows.length, kNoScore, 0.0f, true);
            for (int col = 0; col < kHeadDimV; col += 8) write_eight(row_of_out(work_tile, row), col, make_uint4(0, 0, 0, 0));
        }
    }
};

}  // namespace libflash::cuda::sm90
