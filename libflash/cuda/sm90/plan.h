// The plans of the sm_90a kernels, and the check of their capabilities. No CUDA header.
#pragma once

#include <string>

#include "cuda/architecture.h"

namespace libflash::cuda::sm90 {

ForwardPlan plan_forward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device);
BackwardPlan plan_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device);

// Whether only the device knows the length of a sequence.
inline bool has_lengths_on_device(const AttentionProblem& problem) {
    const auto on_device = [](const Sequences& rows) { return rows.packed() || rows.used; };
    return on_device(problem.q_rows) || on_device(problem.k_rows);
}

// See Architecture::supports.
bool supports(const KernelConfig& config, const AttentionProblem& problem, std::string* why);

}  // namespace libflash::cuda::sm90
