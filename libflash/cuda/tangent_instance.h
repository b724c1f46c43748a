// The instances of forward_tangent that the plan layer distinguishes. No CUDA header.
#pragma once

#include "cuda/plans.h"

namespace libflash::cuda {

// The fused instance also computes out and LSE, so forward does not run before it. All other instances read saved out and LSE.
constexpr Instance kFusedTangentInstance{2, "fused with forward"}, kPlainTangentInstance = kPlainInstance;

inline bool is_fused(const ForwardTangentPlan& plan) { return plan.instance.number == kFusedTangentInstance.number; }

}  // namespace libflash::cuda
