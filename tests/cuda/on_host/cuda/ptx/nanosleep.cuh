// Stands for the library's header of that name.
#pragma once

#include <cstdint>

namespace libflash::cuda {

inline void nanosleep(uint32_t) {}

}  // namespace libflash::cuda
