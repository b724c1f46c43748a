// The template instances of forward for sm_80 and later and their keys per tile, for the plan and the kernel. No CUDA header.
#pragma once

#include "cuda/attention/long_sums.h"
#include "cuda/plans.h"

namespace libflash::cuda {

// Instances with long sums (attention/long_sums.h) are separate: the others have no registers to spare for them.
constexpr Instance kForwardInstances[] = {kPlainInstance, kGeneralInstance, {2, "plain, long sums"}, {3, "general, long sums"}};

// Wide heads (more than 256 channels): one instance supports everything, because the code is large and calls are few. It decides
// at run time whether to use long sums.
constexpr bool is_wide_forward(const KernelConfig& config) { return config.head_dim > 256; }

// Wide heads: bytes of shared memory of a thread block. It holds the tiles, P, two numbers per row for each of the two warps that
// share the row (row_pair.cuh), and the values that are the same for all threads. With float32, K and V are loaded one after the
// other into the same tile, and P stays in registers (channel_pair.cuh).
constexpr int wide_forward_shared_bytes(const KernelConfig& config) {
    if (config.dtype == KernelType::f32_) return (config.tile_q + config.tile_k) * config.head_dim * 4 + config.tile_q * 12 + 512;
    const int tiles = (config.tile_q + 2 * config.tile_k) * config.head_dim * element_bytes(config.dtype);
    return tiles + config.tile_q * config.tile_k * 2 + config.tile_q * 16 + config.tile_q * 8 + 256;
}

// With long sums and more than 192 channels (float32: 64) a plain instance would spill registers; there is only the general one.
constexpr Instance forward_instance_sm80(const KernelConfig& config, bool general, bool long_sums) {
    general |= is_wide_forward(config);
    if (!long_sums) return kForwardInstances[general ? 1 : 0];
    const int most = config.dtype == KernelType::f32_ ? 64 : 192;  // channels of the plain instance with long sums
    return kForwardInstances[general || config.head_dim > most ? 3 : 2];
}

// How many warps share the same query rows (row_pair.cuh). With more than 256 channels the accumulators of 16 rows fill the
// registers of two warps. With 256 channels two warps share 32 rows if shared memory has space for P (`has_space`).
constexpr int forward_sharers(const KernelConfig& config, bool has_space) {
    return is_wide_forward(config) || (has_space && config.head_dim == 256 && config.dtype != KernelType::f32_) ? 2 : 1;
}

// Query rows of a tile divided by the number of its warps. With 32 rows per warp each fragment of K or V is used in two products.
// Registers suffice only for 16 rows with more than 128 channels (64 with rare options and long sums), and in float32 with rare
// options. With wide heads two warps share 16 rows, which makes 8.
constexpr int forward_rows_of_warp(const KernelConfig& config, bool general, bool long_sums) {
    if (is_wide_forward(config)) return 8;
    return config.head_dim > (general && long_sums ? 64 : 128) || (config.dtype == KernelType::f32_ && general) ? 16 : 32;
}

// Keys per tile. `version`: __CUDA_ARCH__ / 10 of the machine code that runs. Tiles have fewer keys where registers are scarce:
// with rare options, with long sums, and on architectures for which the compiler would spill registers; but not where warps have
// fewer rows instead (first line).
constexpr int forward_tile_k_sm80(const KernelConfig& config, bool general, bool long_sums, int version) {
    if (general && long_sums && config.head_dim > 64 && config.head_dim <= 128) return config.tile_k;
    const int most = version < 90 ? 32 : (config.head_dim > 128 ? config.tile_k : (config.head_dim > 64 ? 32 : 64));
    const bool tight = version >= 100 || (version < 90 && config.dtype == KernelType::f16_ && config.head_dim == 64);
    return (general || long_sums || tight) && config.tile_k > most ? most : config.tile_k;
}

}  // namespace libflash::cuda
