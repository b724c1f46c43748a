// Tiles and shared memory of forward_tangent for sm_80 and later, for the plan and the kernel. No CUDA header.
#pragma once

#include "cuda/config.h"
#include "cuda/sm80/tangent_parts.h"

namespace libflash::cuda {

// Query rows of a thread block. With rare options each warp has only 16 rows, because the code for these options needs registers.
constexpr int forward_tangent_tile_q(const KernelConfig& config, bool general) {
    return general && config.tile_q == 128 ? 64 : config.tile_q;
}

constexpr int forward_tangent_warps(const KernelConfig& config) {
    if (loads_in_turn(config)) return config.tile_q / 16 * tangent_parts(config.head_dim, element_bytes(config.dtype));
    return config.dtype == KernelType::f32_ ? config.tile_q / 16 : 4;
}

// Bytes of ForwardTangent::Common, the values that are the same for all threads.
constexpr int kForwardTangentCommonBytes = 192;

// Bytes for Q, K, V and their tangents, the LSE of the rows, and Common. loads_in_turn(): one tile for K, V and their tangents.
constexpr int forward_tangent_shared_bytes(const KernelConfig& config, bool general) {
    const int tile_q = forward_tangent_tile_q(config, general), row = config.head_dim * element_bytes(config.dtype);
    return (2 * tile_q + (loads_in_turn(config) ? 1 : 4) * config.tile_k) * row + tile_q * 4 + kForwardTangentCommonBytes;
}

}  // namespace libflash::cuda
