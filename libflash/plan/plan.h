// How a problem will be done: one complete plan for each operation. It is made from the problem and the device without touching
// tensor data; then explain prints it, the workspace query reads it, and launch() does what it says.
#pragma once

#include <cstddef>

#include "plan/registry.h"
#include "problem/build.h"

namespace libflash {

template <class CudaPlan>
struct PlanOf {
    const KernelEntry* kernel = nullptr;
    cpu::Plan cpu;  // if the kernel is one of the CPU
    CudaPlan cuda;  // if it is one of CUDA
    size_t workspace_bytes = 0;
};
using ForwardPlan = PlanOf<cuda::ForwardPlan>;
using BackwardPlan = PlanOf<cuda::BackwardPlan>;
using DecodePlan = PlanOf<cuda::DecodePlan>;
using MergePlan = PlanOf<cuda::MergePlan>;        // needs no workspace
using CompressPlan = PlanOf<cuda::CompressPlan>;  // nor does this

// With the first kernel that accepts the problem; refuse if none does.
ForwardPlan plan_forward(const AttentionProblem& problem);
BackwardPlan plan_backward(const AttentionProblem& problem);
DecodePlan plan_decode(const DecodeProblem& problem);
MergePlan plan_merge(const MergeProblem& problem);
CompressPlan plan_compress(const CompressProblem& problem);

// With a kernel that accepts the problem.
ForwardPlan plan_forward(const AttentionProblem& problem, const KernelEntry& kernel);
BackwardPlan plan_backward(const AttentionProblem& problem, const KernelEntry& kernel);
DecodePlan plan_decode(const DecodeProblem& problem, const KernelEntry& kernel);

// `workspace`: at least plan.workspace_bytes, aligned to kWorkspaceAlignment.
void launch(const AttentionProblem& problem, const ForwardPlan& plan, void* workspace, void* stream);
void launch(const AttentionProblem& problem, const BackwardPlan& plan, void* workspace, void* stream);
void launch(const DecodeProblem& problem, const DecodePlan& plan, void* workspace, void* stream);
void launch(const MergeProblem& problem, const MergePlan& plan, void* stream);
void launch(const CompressProblem& problem, const CompressPlan& plan, void* stream);

}  // namespace libflash
