// The plans of the sm_90a kernels, and the check of their capabilities. No CUDA header.
#pragma once

#include <string>

#include "cuda/architecture.h"

namespace libflash::cuda::sm90 {

ForwardPlan plan_forward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device);
ForwardPlan plan_wide_forward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device);
BackwardPlan plan_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device);
BackwardPlan plan_wide_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device);

DecodePlan plan_decode(const Kernel& kernel, const DecodeProblem& problem, const DeviceProperties& device,
                       const DecodePrefill& prefill);
void plan_prefix(DecodePlan& plan, const Kernel& kernel, const DecodeProblem& problem, const DeviceProperties& device);
PrefillPlan plan_prefill(const Kernel& kernel, const DecodeProblem& problem, const DeviceProperties& device);
ForwardTangentPlan plan_forward_tangent(const Kernel& kernel, const TangentProblem& problem, const DeviceProperties& device);
BackwardTangentPlan plan_backward_tangent(const Kernel& kernel, const TangentProblem& problem, const DeviceProperties& device);

// Whether only the device knows the length of a sequence.
inline bool has_lengths_on_device(const AttentionProblem& problem) {
    const auto on_device = [](const Sequences& rows) { return rows.packed() || rows.used; };
    return on_device(problem.q_rows) || on_device(problem.k_rows);
}

// See Architecture::supports.
bool supports(const KernelConfig& config, const AttentionProblem& problem, std::string* why);
bool supports_decode(const KernelConfig& config, const DecodeProblem& problem, std::string* why);
bool supports_prefix(const KernelConfig& config, const DecodeProblem& problem, std::string* why);
bool supports_prefill(const KernelConfig& config, const DecodeProblem& problem, std::string* why);
bool supports_tangent(const KernelConfig& config, const TangentProblem& problem, std::string* why);

// As supports(), for forward and backward with more than 256 channels, which have separate kernels.
bool supports_wide_forward(const AttentionProblem& problem, std::string* why);
bool supports_wide_backward(const KernelConfig& config, const AttentionProblem& problem, std::string* why);

// Whether TMA can read all tensors that the kernels of a problem read by TMA; if not, fills in `why` as in problem/check.h.
bool tma_reads_all(const AttentionProblem& problem, std::string* why);

}  // namespace libflash::cuda::sm90
