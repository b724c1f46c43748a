// The position of a consumer thread of the sm_90a forward kernel: its warpgroup and lane, and its rows of a work tile.
#pragma once

#include "cuda/ptx/hide_from_compiler.cuh"

namespace libflash::cuda::sm90 {

struct ForwardConsumerThread {
    static constexpr int kGroupRows = 64, kWarpRows = 16;
    int group, lane;

    // Whether this lane is the first of the four lanes that share its rows.
    __device__ __forceinline__ bool is_first_of_row() const { return (lane & 3) == 0; }
    // Number of the warp among the consumer warps.
    __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / 32 - 4; }
    // The thread has parts of two rows (r = 0, 1). Row r, relative to the first row of the work tile.
    __device__ __forceinline__ int local_row(int r) const {
        return (hide_from_compiler(static_cast<int>(threadIdx.x)) >> 5 << 4) - kGroupRows + r * 8 + (lane >> 2);
    }
    // Row r in its sequence.
    template <class WorkTile>
    __device__ __forceinline__ int row(const WorkTile& work_tile, int r) const {
        return work_tile.keys.first_row + local_row(r);
    }
    template <class WorkTile>
    __device__ __forceinline__ int first_row_of_warp(const WorkTile& work_tile) const {
        return work_tile.keys.first_row + warp() * kWarpRows;
    }
};

}  // namespace libflash::cuda::sm90
