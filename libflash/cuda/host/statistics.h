// Statistics of rows, an option of forward: which kernels compute them, and the launch that prepares them.
#pragma once

#include <string>

#include "cuda/kernels.h"
#include "problem/attention.h"

namespace libflash::cuda {

inline bool wants_statistics(const AttentionProblem& p) { return p.max_logit.present || p.entropy.present; }

// Whether the largest score of each head is wanted, not of each row.
inline bool wants_head_maxima(const AttentionProblem& p) { return p.max_logit.present && p.max_logit.ndim == 1; }

// Whether kernel and call agree: the kernel computes statistics and the call requests them, or neither. If not, writes the reason
// to `why`.
bool agrees_on_statistics(const KernelConfig& config, const AttentionProblem& problem, std::string* why);

// The launch that sets the largest scores of the heads to -infinity.
void plan_head_maxima(ForwardPlan& plan, const Kernel& kernel, const AttentionProblem& problem);

}  // namespace libflash::cuda
