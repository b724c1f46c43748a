// Thread blocks of prefill in pairs. A pair is a cluster of two thread blocks, which compute the same query tile of two query
// heads that share a key head, so they need the same keys at the same time. Each of them loads a half of the boxes of a tile of K
// or V into the shared memory of both. Small pages need many boxes, and the TMA unit of a multiprocessor takes a fixed time for
// each.
//
// A stage of K or V is empty when the consumers of both thread blocks have released it. Tiles that only one thread block needs
// (recomputation), or that need zeros, are loaded by each thread block for itself.
#pragma once

#include "cuda/attention/prefill_params.h"
#include "cuda/ptx/nanosleep.cuh"
#include "cuda/sm90/cluster_pair.cuh"

namespace libflash::cuda::sm90 {

// The query head of this thread block, from the number of the head, or of the pair of heads.
__device__ __forceinline__ int head_of_pair(const PrefillParams& params, int number) {
    return (number << params.in_pairs) + rank_of_pair(params.in_pairs);
}

// The next unit of the dynamic schedule: the first thread block takes it from the counter, and tells the second one by `next`,
// a number that belongs to the unit before it.
__device__ __forceinline__ int take_unit_of_pair(int* counter, int fixed, volatile int* next) {
    if (blockIdx.x % 2 == 0) {
        const int unit = fixed + atomicAdd(counter, 1);
        *next = 1 + unit;
        return unit;
    }
    int told = *next;
    while (told == 0) {
        nanosleep(100);
        told = *next;
    }
    return told - 1;
}

}  // namespace libflash::cuda::sm90
