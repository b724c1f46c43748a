// The template instances of the sm_90a backward_tangent kernels, for the plan and for the kernels. No CUDA header.
#pragma once

#include "cuda/config.h"
#include "cuda/plans.h"

namespace libflash::cuda {

// kConstantDoutInstance: dout has no tangent, as in double backward. This saves products in each kernel.
constexpr Instance kMovingDoutInstance{0, "plain"}, kConstantDoutInstance{1, "dout without tangent"};

// With more than 128 channels tdq, tdk and tdv have separate kernels, with one thread block per work tile.
constexpr bool has_kernel_for_each_gradient(const KernelConfig& config) { return config.head_dim > 128; }

}  // namespace libflash::cuda
