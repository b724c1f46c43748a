// Shared memory of backward_tangent for sm_80 and later, for the plan and the kernel. No CUDA header.
#pragma once

#include "cuda/attention/tangent_params.h"
#include "cuda/config.h"
#include "cuda/sm80/tangent_parts.h"

namespace libflash::cuda {

constexpr int kBackwardTangentCommonBytes = 256;

// A thread block has a tile of tile_q rows of one side and loops over tiles of tile_k rows of the other side. Shared memory has
// tiles of four tensors of each side: Q, dO and their tangents, and K, V and their tangents. loads_in_turn(): of two tensors of
// the rows and of one of the columns.
constexpr int backward_tangent_shared_bytes(const KernelConfig& config) {
    const int statistics = config.tile_q * static_cast<int>(sizeof(TangentStatistics));  // of queries; tile_k is not larger
    const bool in_turn = loads_in_turn(config);
    const int rows = (in_turn ? 2 : 4) * config.tile_q + (in_turn ? 1 : 4) * config.tile_k;
    return rows * config.head_dim * element_bytes(config.dtype) + statistics + kBackwardTangentCommonBytes;
}

}  // namespace libflash::cuda
