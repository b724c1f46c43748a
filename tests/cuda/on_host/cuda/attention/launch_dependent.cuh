// Replaces the library's header: kernels run one after the other.
#pragma once

#include "emulation.h"

namespace libflash::cuda {

template <class... Params>
int launch_dependent(void (*kernel)(Params...), int64_t blocks, int threads, int, cudaStream_t, bool, const Params&... params) {
    emulation::launch(static_cast<unsigned>(blocks), static_cast<unsigned>(threads), [&] { kernel(params...); });
    return cudaSuccess;
}

}  // namespace libflash::cuda
