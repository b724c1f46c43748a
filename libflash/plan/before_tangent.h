// What runs before the CUDA kernels of tangents: forward, because they start from out and LSE, unless FLASH_FLAG_FROM_LSE gives
// these or the kernel computes them too (cuda/tangent_instance.h); backward, where a call of backward_tangent wants the gradients
// too.
#pragma once

#include "problem/build.h"

namespace libflash {

// Whether the LSE of that forward call needs memory: the caller does not want it.
inline bool needs_lse(const TangentProblem& problem) { return !problem.backward && !problem.from_lse && !problem.lse.present; }

size_t lse_bytes(const TangentProblem& problem);

// The problem with `lse` as its LSE.
TangentProblem with_lse(TangentProblem problem, void* lse);

// The call of forward or backward with the problem's arguments. It chooses its own kernel, of the requested backend.
AttentionProblem primal_before(const TangentProblem& problem);

}  // namespace libflash
