// How the tangent kernels for sm_80 and later divide the channels, for the plans and the kernels. No CUDA header.
#pragma once

#include "cuda/config.h"

namespace libflash::cuda {

// Whether the rows of all tensors are too many bytes for shared memory, so that the tensors of keys (backward: of both sides) are
// loaded one after the other. `element`: bytes of an element.
constexpr bool loads_in_turn(int head_dim, int element) { return head_dim * element > 512; }
constexpr bool loads_in_turn(const KernelConfig& config) { return loads_in_turn(config.head_dim, element_bytes(config.dtype)); }

// How many warps share the same rows; each has a part of the channels.
constexpr int tangent_parts(int head_dim, int element) { return loads_in_turn(head_dim, element) ? 4 : 1; }

}  // namespace libflash::cuda
