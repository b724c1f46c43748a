// The template instances of the sm_90a forward_tangent kernel, for the plan and for the kernel. No CUDA header.
#pragma once

#include "cuda/tangent_instance.h"

namespace libflash::cuda {

// What an instance computes.
//   fused     out and LSE together with their tangents
//   from_lse  the tangents, from saved out and LSE
enum class TangentInstance { from_lse = kPlainTangentInstance.number, fused = kFusedTangentInstance.number };

}  // namespace libflash::cuda
