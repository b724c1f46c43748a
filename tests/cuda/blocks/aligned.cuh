// Where a tile in the order of tile/swizzled_tile.cuh may begin in shared memory: the launch asks for 1024 bytes more.
#pragma once

#include "cuda/ptx/cp_async.cuh"

namespace blocks {

__device__ inline char* aligned(char* shared) { return shared + (1024 - libflash::cuda::shared_address(shared) % 1024) % 1024; }

}  // namespace blocks
