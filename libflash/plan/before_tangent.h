// The calls that run before the CUDA kernels of tangents. Before forward_tangent: forward, which computes out and LSE, unless the
// caller passes these (FLASH_FLAG_FROM_LSE) or the kernel computes them too (cuda/tangent_instance.h). Before backward_tangent:
// backward, if the caller requests the gradients too.
#pragma once

#include "problem/build.h"

namespace libflash {

// Whether the LSE of the forward call needs workspace, because the caller has not requested it.
inline bool needs_lse(const TangentProblem& problem) { return !problem.backward && !problem.from_lse && !problem.lse.present; }

size_t lse_bytes(const TangentProblem& problem);

// A copy of the problem with `lse` as its LSE.
TangentProblem with_lse(TangentProblem problem, void* lse);

// The problem of the forward or backward call. Its kernel is chosen independently, from the requested backend.
AttentionProblem primal_before(const TangentProblem& problem);

}  // namespace libflash
