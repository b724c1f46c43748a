// Keys per tile of each template instance of forward for sm_80 and later, for the plan and the kernel. No CUDA header.
#pragma once

#include "cuda/config.h"

namespace libflash::cuda {

// `version`: __CUDA_ARCH__ / 10 of the code that runs. Tiles are smaller if registers are short: with rare options, and on
// architectures where the compiler would spill.
constexpr int forward_tile_k_sm80(const KernelConfig& config, bool general, int version) {
    const int most = version < 90 ? 32 : (config.head_dim > 128 ? config.tile_k : (config.head_dim > 64 ? 32 : 64));
    const bool tight = version >= 100 || (version < 90 && config.dtype == KernelType::f16_ && config.head_dim == 64);
    return (general || tight) && config.tile_k > most ? most : config.tile_k;
}

}  // namespace libflash::cuda
