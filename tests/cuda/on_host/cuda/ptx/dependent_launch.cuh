// Replaces the library's header: kernels run one after the other.
#pragma once

namespace libflash::cuda {

inline void wait_for_previous_kernel() {}
inline void allow_next_kernel() {}

}  // namespace libflash::cuda
