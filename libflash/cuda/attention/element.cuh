// The C++ type of a kernel's elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/config.h"

namespace libflash::cuda {

template <KernelType type>
using ElementOf =
    std::conditional_t<type == KernelType::f32_, float, std::conditional_t<type == KernelType::f16_, __half, __nv_bfloat16>>;

}  // namespace libflash::cuda
