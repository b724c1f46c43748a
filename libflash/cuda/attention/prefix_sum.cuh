// Prefix sums over the lanes of a warp, with which a thread block finds the sequence of its work tile.
#pragma once

namespace libflash::cuda {

// The sum of `own` over all lanes up to and including this one.
__device__ __forceinline__ int inclusive_prefix_sum(int own, int lane) {
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    return sum;
}

}  // namespace libflash::cuda
