// The template instances of the sm_90a forward_tangent kernel, for the plan and for the kernel. No CUDA header.
#pragma once

#include "cuda/config.h"
#include "cuda/tangent_instance.h"

namespace libflash::cuda {

// What an instance computes.
//   fused     out and LSE together with their tangents
//   from_lse  the tangents, from saved out and LSE
enum class TangentInstance { from_lse = kPlainTangentInstance.number, fused = kFusedTangentInstance.number };

// Whether a kernel has the fused instance. With more channels a warpgroup has no registers for two accumulators, and forward runs
// before the kernel.
constexpr bool is_fused_with_forward(const KernelConfig& config) { return config.head_dim_v <= 128; }

}  // namespace libflash::cuda
