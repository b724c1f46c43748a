// Replaces the library's header.
#pragma once

#include "emulation.h"

namespace libflash::cuda {

inline void warp_barrier() { __syncwarp(); }

}  // namespace libflash::cuda
