// A barrier of a warp that is an instruction even where the compiler knows that the lanes have converged, and __syncwarp() is none.
// Race checkers see no other order between what all lanes have read and the arrival of one lane at an mbarrier.
#pragma once

#include "cuda/ptx/hide_from_compiler.cuh"

namespace libflash::cuda {

__device__ __forceinline__ void warp_barrier() {
    asm volatile("bar.warp.sync %0;" ::"r"(hide_from_compiler(-1)) : "memory");
}

}  // namespace libflash::cuda
