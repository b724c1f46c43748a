// The template instances of forward for sm_80 and later and their keys per tile, for the plan and the kernel. No CUDA header.
#pragma once

#include "cuda/attention/long_sums.h"
#include "cuda/plans.h"

namespace libflash::cuda {

// Instances with long sums (attention/long_sums.h) are separate: the others have no register to spare for them.
constexpr Instance kForwardInstances[] = {kPlainInstance, kGeneralInstance, {2, "plain, long sums"}, {3, "general, long sums"}};

constexpr Instance forward_instance_sm80(bool general, bool long_sums) { return kForwardInstances[general + 2 * long_sums]; }

// `version`: __CUDA_ARCH__ / 10 of the code that runs. Tiles are smaller if registers are short: with rare options, with long
// sums, and on architectures where the compiler would spill.
constexpr int forward_tile_k_sm80(const KernelConfig& config, bool general, bool long_sums, int version) {
    const int most = version < 90 ? 32 : (config.head_dim > 128 ? config.tile_k : (config.head_dim > 64 ? 32 : 64));
    const bool tight = version >= 100 || (version < 90 && config.dtype == KernelType::f16_ && config.head_dim == 64);
    return (general || long_sums || tight) && config.tile_k > most ? most : config.tile_k;
}

}  // namespace libflash::cuda
