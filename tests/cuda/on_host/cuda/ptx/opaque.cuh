// Stands for the library's header of that name.
#pragma once

namespace libflash::cuda {

inline int opaque(int value) { return value; }

}  // namespace libflash::cuda
