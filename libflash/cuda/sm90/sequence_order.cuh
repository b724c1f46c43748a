// The dynamic tile scheduler, for work tiles whose length is not known at launch: lengths on the device, block masks. A unit is
// one query tile of one head or, for a pair of thread blocks (block_pair.cuh), of two heads. Units are numbered sequence by
// sequence, the sequence with the most keys first; each has all tiles of all its heads. Where later rows see more keys, the
// longest tiles of a group of heads come first and its shortest last, so that thread blocks end at about the same time. Results
// do not depend on which thread block computes a unit.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/forward_sequences.cuh"

namespace libflash::cuda::sm90 {

constexpr int kOrderThreads = 512;

// A unit: one of the tiles of a head. With pairs of thread blocks `head` counts pairs of heads.
struct alignas(16) ScheduledUnit {
    int32_t batch, head, tile;
};

// The state of the scheduler, in the workspace. A schedule (given_order.cuh) has the numbers of units and of thread blocks and
// the units in the same places, and nothing after them.
struct SequenceOrder {
    int32_t* base;

    __device__ __forceinline__ explicit SequenceOrder(int32_t* memory) : base(memory) {}
    __device__ __forceinline__ explicit SequenceOrder(const ForwardParams& params) : base(params.sequence_order) {}
    __device__ __forceinline__ int* counter() const { return base; }  // units taken after the first two of each thread block
    __device__ __forceinline__ int& units() const { return base[1]; }
    __device__ __forceinline__ int& blocks() const { return base[2]; }  // prefill: the thread blocks that work
    __device__ __forceinline__ ScheduledUnit& unit(int number) const {
        return reinterpret_cast<ScheduledUnit*>(base + 4)[number];
    }
    // For each unit: the unit that its thread block took before it, or -1. This number is not a part of ScheduledUnit: it is
    // written right before the ScheduledUnit is loaded, and the load would wait for the write.
    template <class Params>
    __device__ __forceinline__ int& previous_unit(const Params& params, int number) const {
        return (&unit(params.schedule.heads * params.schedule.tiles).batch)[number];
    }
    // For each unit: 1 + the unit that its pair of thread blocks takes after it, or 0 as long as that is not known. With pairs
    // there are half as many units, and these numbers have a part of the other half of the memory.
    template <class Params>
    __device__ __forceinline__ volatile int* next_unit(const Params& params) const {
        return &unit(most_units(params)).batch;
    }
    // An upper bound of units().
    template <class Params>
    __device__ __forceinline__ static int most_units(const Params& params) {
        return params.schedule.heads / heads_of_unit(params) * params.schedule.tiles;
    }
};

// Sequences in order, and their units.
struct SortedSequences {
    int batch[kOrderThreads], tiles[kOrderThreads];
    int group_heads[kOrderThreads];  // see heads_of_group()
    int end[kOrderThreads];          // the number of units up to the last one of the sequence

    // The first sequence whose units end after `number`.
    __device__ __forceinline__ int sequence_of(int number, int count) const {
        int at = 0;
        for (int last = count - 1; at < last;) {
            const int middle = (at + last) / 2;
            if (end[middle] > number)
                last = middle;
            else
                at = middle + 1;
        }
        return at;
    }
    // A unit of sequence `at` by its number among those of all sequences. `heads`: heads, or pairs of heads.
    __device__ __forceinline__ ScheduledUnit unit(int number, int at, int heads, bool reversed) const {
        const int of_sequence = number - (at > 0 ? end[at - 1] : 0);
        if (tiles[at] == 1) return {batch[at], of_sequence, 0};
        int of_group = of_sequence, first_head = 0;
        if (group_heads[at] < heads) {
            first_head = of_sequence / (group_heads[at] * tiles[at]) * group_heads[at];
            of_group = of_sequence - first_head * tiles[at];
        }
        const int here = min(group_heads[at], heads - first_head);  // the last group may be smaller
        const int tile = of_group / here;
        return {batch[at], first_head + of_group - tile * here, reversed ? tiles[at] - 1 - tile : tile};
    }
};

// One thread block writes the order. It sorts groups of kOrderThreads sequences, not all sequences: among more sequences none is
// a large part of the work. Unit numbers are clamped to the size of the workspace, so that wrong lengths do no harm. Returns the
// number of units.
template <int kTileRows, class Params>
__device__ __forceinline__ int write_sequence_order(const Params& params) {
    __shared__ int keys[kOrderThreads];
    __shared__ SortedSequences sorted;
    const SequenceOrder order(params);
    const int most = SequenceOrder::most_units(params), heads = params.heads_q / heads_of_unit(params);
    const int thread = static_cast<int>(threadIdx.x);
    const bool reversed = params.schedule.reversed;
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
            sorted.batch[rank] = entry;
            sorted.tiles[rank] = tiles;
            sorted.group_heads[rank] = reversed ? heads_of_group(params, keys[thread]) : 1;
            sorted.end[rank] = min(tiles * heads, most);
        }
        __syncthreads();
        for (int step = 1; step < here; step *= 2) {
            const int other = thread >= step && thread < here ? sorted.end[thread - step] : 0;
            __syncthreads();
            if (thread < here) sorted.end[thread] = min(sorted.end[thread] + other, most);
            __syncthreads();
        }
        const int count = min(sorted.end[here - 1], most - before);
        // Each warp writes consecutive units, which belong to few sequences.
        const int share = (count + kOrderThreads / 32 - 1) / (kOrderThreads / 32), first = thread / 32 * share,
                  end = min(first + share, count);
        for (int unit = first + thread % 32, at = sorted.sequence_of(first, here); unit < end; unit += 32) {
            while (sorted.end[at] <= unit) ++at;
            order.unit(before + unit) = sorted.unit(unit, at, heads, reversed);
        }
        before += count;
        __syncthreads();
    }
    if (thread == 0) {
        *order.counter() = 0;
        order.units() = before;
    }
    return before;
}

template <class Kernel, int kTileRows, class Params>
__global__ void __launch_bounds__(kOrderThreads) order_kernel(const __grid_constant__ Params params) {
    wait_for_previous_kernel();
    allow_next_kernel();
    write_sequence_order<kTileRows>(params);
}

}  // namespace libflash::cuda::sm90
