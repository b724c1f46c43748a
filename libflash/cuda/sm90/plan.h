// The plans of the sm_90a kernels, and the check of their capabilities. No CUDA header.
#pragma once

#include <string>

#include "cuda/architecture.h"

namespace libflash::cuda::sm90 {

ForwardPlan plan_forward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device);
BackwardPlan plan_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device);

// See Architecture::supports.
bool supports(const KernelConfig& config, const AttentionProblem& problem, std::string* why);

}  // namespace libflash::cuda::sm90
