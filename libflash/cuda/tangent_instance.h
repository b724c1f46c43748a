// The instances of forward_tangent that the plan layer distinguishes. No CUDA header.
#pragma once

#include "cuda/plans.h"

namespace libflash::cuda {

// Fused: it computes out and LSE too, so that no call of forward comes before it. All others start from saved out and LSE.
constexpr Instance kFusedTangentInstance{2, "fused with forward"}, kPlainTangentInstance = kPlainInstance;

inline bool is_fused(const ForwardTangentPlan& plan) { return plan.instance.number == kFusedTangentInstance.number; }

}  // namespace libflash::cuda
