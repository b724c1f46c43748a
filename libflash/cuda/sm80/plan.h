// The plans of the kernels for sm_80 and later. No CUDA header.
#pragma once

#include "cuda/architecture.h"

namespace libflash::cuda::sm80 {

bool supports_wide_backward(const KernelConfig& config, const AttentionProblem& problem, std::string* why);
bool supports_decode(const KernelConfig& config, const DecodeProblem& problem, std::string* why);
bool supports_tangent(const KernelConfig& config, const TangentProblem& problem, std::string* why);
ForwardPlan plan_forward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device);
BackwardPlan plan_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device);
LaunchShape plan_bias_gradient(const Kernel& kernel, const AttentionProblem& problem);
DecodePlan plan_decode(const Kernel& kernel, const DecodeProblem& problem, const DeviceProperties& device,
                       const DecodePrefill& prefill);
ForwardTangentPlan plan_forward_tangent(const Kernel& kernel, const TangentProblem& problem, const DeviceProperties& device);
BackwardTangentPlan plan_backward_tangent(const Kernel& kernel, const TangentProblem& problem, const DeviceProperties& device);

}  // namespace libflash::cuda::sm80
