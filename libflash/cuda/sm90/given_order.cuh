// Takes the order of the units of a prefill kernel from a schedule of the caller, which several calls may read at the same time:
// copies it to the workspace. So the prefill kernel has no code for schedules, and clamps nothing. A schedule may hold any
// numbers. They are clamped here, so that the prefill kernel stays within its tensors and ends. A tile after the last one of its
// sequence has no rows.
#pragma once

#include "cuda/sm90/sequence_order.cuh"

namespace libflash::cuda::sm90 {

// A number below `count`. Negative numbers become the largest one.
__device__ __forceinline__ int below(int number, int count) {
    return static_cast<int>(min(static_cast<uint32_t>(number), static_cast<uint32_t>(count - 1)));
}

// All thread blocks of the order kernel call it. Heads are divided by a shift, which takes less code than a division.
__device__ __forceinline__ void take_given_order(const PrefillParams& params) {
    const SequenceOrder order(params), given(const_cast<int32_t*>(params.given_order));  // `given` is only read
    const int pairs = params.in_pairs, most = params.schedule.heads * params.schedule.tiles >> pairs,
              units = min(max(given.units(), 0), most), heads = params.heads_q >> pairs;
    int number = static_cast<int>(blockIdx.x) * kOrderThreads + static_cast<int>(threadIdx.x);
    if (number == 0) {
        *order.counter() = 0;
        order.units() = units;
        // Without decode beside it, all thread blocks work. In pairs their number is even.
        const int blocks = params.multiprocessors == 0 ? params.blocks : min(given.blocks(), params.blocks);
        order.blocks() = max(blocks >> pairs, 1) << pairs;
    }
#pragma unroll 1
    for (; number < units; number += static_cast<int>(gridDim.x) * kOrderThreads) {
        const ScheduledUnit unit = given.unit(number);
        order.unit(number) = {below(unit.batch, params.batch), below(unit.head, heads), below(unit.tile, params.schedule.tiles)};
        if (pairs) (&order.unit(most).batch)[number] = 0;  // next_unit()
    }
}

}  // namespace libflash::cuda::sm90
