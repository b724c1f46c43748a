// The dynamic tile scheduler, for work tiles whose length is not known at launch: lengths on the device, block masks. A unit is
// one query tile of one head or, for a pair of thread blocks (block_pair.cuh), of two heads. Units are numbered sequence by
// sequence, the sequence with the most keys first; each has all tiles of all its heads. Results do not depend on which thread
// block computes a unit.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/sm90/forward_sequences.cuh"

namespace libflash::cuda::sm90 {

constexpr int kOrderThreads = 512;

// The state of the scheduler, in the workspace.
struct SequenceOrder {
    int32_t* base;
    int32_t batch;

    __device__ __forceinline__ explicit SequenceOrder(const ForwardParams& params)
        : base(params.sequence_order), batch(params.batch) {}
    __device__ __forceinline__ int* counter() const { return base; }  // units taken after the first two of each thread block
    __device__ __forceinline__ int& units() const { return base[1]; }
    __device__ __forceinline__ int& blocks() const { return base[2]; }          // prefill: the thread blocks that work
    __device__ __forceinline__ int* sequence() const { return base + 3; }       // by position in the order: the sequence
    __device__ __forceinline__ int* first() const { return base + 3 + batch; }  // likewise: its first unit; at the end, all units
    __device__ __forceinline__ int* previous_unit() const {
        // For each unit: the unit that its thread block took before it, or -1.
        return base + 4 + 2 * int64_t{batch};
    }
    // For each unit: 1 + the unit that its pair of thread blocks takes after it, or 0 as long as that is not known. With pairs
    // there are half as many units, and these numbers have the second half of the memory.
    template <class Params>
    __device__ __forceinline__ volatile int* next_unit(const Params& params) const {
        return previous_unit() + most_units(params);
    }
    // An upper bound of units().
    template <class Params>
    __device__ __forceinline__ static int most_units(const Params& params) {
        return params.schedule.heads / heads_of_unit(params) * params.schedule.tiles;
    }

    // The position in the order of the sequence that a unit belongs to. A whole warp calls it.
    __device__ __forceinline__ int position_of(int unit) const {
        const int lane = static_cast<int>(threadIdx.x % 32);
        int low = 0, count = batch;
        while (count > 1) {
            const int step = (count + 31) / 32;
            const bool begins_before = lane * step < count && first()[low + lane * step] <= unit;
            const int last = __popc(__ballot_sync(0xffffffffu, begins_before)) - 1;
            low += last * step;
            count = min(step, count - last * step);
        }
        return low;
    }

    // `schedule.reversed`: the last tile of a head comes first, because later rows see more keys.
    template <int kTileRows, class Params>
    __device__ __forceinline__ TileCoordinates tile_of(int unit, const Params& params) const {
        const int position = position_of(unit), entry = sequence()[position];
        const int tiles = (query_rows_of(params, entry).owned + kTileRows - 1) / kTileRows;
        const int head = (unit - first()[position]) / tiles, tile = unit - first()[position] - head * tiles;
        return {entry, head, params.schedule.reversed ? tiles - 1 - tile : tile};
    }
};

// One thread block writes the order. It sorts groups of kOrderThreads sequences, not all sequences: among more sequences none is
// a large part of the work. Unit numbers are clamped to the size of the workspace, so that wrong lengths do no harm. Returns the
// number of units.
template <int kTileRows, class Params>
__device__ __forceinline__ int write_sequence_order(const Params& params) {
    __shared__ int keys[kOrderThreads], sums[kOrderThreads];
    const SequenceOrder order(params);
    const int most = SequenceOrder::most_units(params), heads = params.heads_q / heads_of_unit(params);
    const int thread = static_cast<int>(threadIdx.x);
    int before = 0;
    for (int start = 0; start < params.batch; start += kOrderThreads) {
        const int here = min(kOrderThreads, params.batch - start), entry = start + thread;
        int tiles = 0;
        if (thread < here) {
            tiles = (query_rows_of(params, entry).owned + kTileRows - 1) / kTileRows;
            keys[thread] = keys_of(params, entry).length;
        }
        __syncthreads();
        int rank = 0;
        for (int other = 0; thread < here && other < here; ++other)
            rank += keys[other] > keys[thread] || (keys[other] == keys[thread] && other < thread);
        if (thread < here) {
            order.sequence()[start + rank] = entry;
            sums[rank] = min(tiles * heads, most);
        }
        __syncthreads();
        for (int step = 1; step < here; step *= 2) {
            const int other = thread >= step && thread < here ? sums[thread - step] : 0;
            __syncthreads();
            if (thread < here) sums[thread] = min(sums[thread] + other, most);
            __syncthreads();
        }
        if (thread < here) order.first()[start + thread + 1] = min(before + sums[thread], most);
        before = min(before + sums[here - 1], most);
        __syncthreads();
    }
    if (thread == 0) {
        *order.counter() = order.first()[0] = 0;
        order.units() = before;
    }
    return before;
}

template <class Kernel, int kTileRows, class Params>
__global__ void __launch_bounds__(kOrderThreads) order_kernel(const __grid_constant__ Params params) {
    write_sequence_order<kTileRows>(params);
}

}  // namespace libflash::cuda::sm90
