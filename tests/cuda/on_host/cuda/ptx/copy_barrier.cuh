// Replaces the library's header.
#pragma once

#include "cuda/ptx/barrier.cuh"

namespace libflash::cuda {

void arrive_after_copies(const MBarrier& barrier);

}  // namespace libflash::cuda
