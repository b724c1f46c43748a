// Stands in for the library's: kernels run one after the other.
#pragma once

namespace libflash::cuda {

inline void wait_for_kernel_ahead() {}
inline void let_next_kernel_begin() {}

}  // namespace libflash::cuda
