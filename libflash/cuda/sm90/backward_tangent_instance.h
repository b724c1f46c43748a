// The template instances of the sm_90a backward_tangent kernels, for the plan and for the kernels. No CUDA header.
#pragma once

#include "cuda/plans.h"

namespace libflash::cuda {

// constant_dout: dout has no tangent, as in double backward. That saves a product in each kernel.
constexpr Instance kMovingDoutInstance{0, "plain"}, kConstantDoutInstance{1, "dout without tangent"};

}  // namespace libflash::cuda
