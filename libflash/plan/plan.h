// The complete plan of each operation. It is made from the problem and the device without reading tensor data; explain prints it,
// the workspace query returns its size, and launch() runs it.
#pragma once

#include <cstddef>

#include "plan/registry.h"
#include "problem/build.h"

namespace libflash {

template <class CudaPlan>
struct PlanOf {
    const KernelEntry* kernel = nullptr;
    cpu::Plan cpu;  // set for a CPU kernel
    CudaPlan cuda;  // set for a CUDA kernel
    size_t workspace_bytes = 0;
};
using ForwardPlan = PlanOf<cuda::ForwardPlan>;
using BackwardPlan = PlanOf<cuda::BackwardPlan>;
using DecodePlan = PlanOf<cuda::DecodePlan>;
using MergePlan = PlanOf<cuda::MergePlan>;            // no workspace
using CompressPlan = PlanOf<cuda::CompressPlan>;      // no workspace
using CacheWritePlan = PlanOf<cuda::CacheWritePlan>;  // no workspace

struct TangentPlan {
    const KernelEntry* kernel = nullptr;
    cpu::Plan cpu;
    // CUDA: the plan of the operation. `forward` and `backward` have no kernel if they are not needed.
    cuda::ForwardTangentPlan forward_tangent;
    cuda::BackwardTangentPlan backward_tangent;
    ForwardPlan forward;    // if out and LSE are neither given nor computed by the kernel
    BackwardPlan backward;  // if gradients are requested
    Workspace workspace;    // regions of forward_tangent: "forward", "lse"; of backward_tangent: "tangent", "backward"
    size_t workspace_bytes = 0;
};

// The plan with the first kernel that accepts the problem. These functions throw Error if none does.
ForwardPlan plan_forward(const AttentionProblem& problem);
BackwardPlan plan_backward(const AttentionProblem& problem);
DecodePlan plan_decode(const DecodeProblem& problem);
TangentPlan plan_tangent(const TangentProblem& problem);
MergePlan plan_merge(const MergeProblem& problem);
CompressPlan plan_compress(const CompressProblem& problem);
CacheWritePlan plan_cache_write(const CacheWriteProblem& problem);

// The plan with `kernel`, which must accept the problem.
ForwardPlan plan_forward(const AttentionProblem& problem, const KernelEntry& kernel);
BackwardPlan plan_backward(const AttentionProblem& problem, const KernelEntry& kernel);
DecodePlan plan_decode(const DecodeProblem& problem, const KernelEntry& kernel);
TangentPlan plan_tangent(const TangentProblem& problem, const KernelEntry& kernel);

// `workspace`: at least plan.workspace_bytes, aligned to kWorkspaceAlignment.
void launch(const AttentionProblem& problem, const ForwardPlan& plan, void* workspace, void* stream);
void launch(const AttentionProblem& problem, const BackwardPlan& plan, void* workspace, void* stream);
void launch(const DecodeProblem& problem, const DecodePlan& plan, void* workspace, void* stream);
// Writes the schedule of the problem, if the plan has one.
void launch_schedule(const DecodeProblem& problem, const DecodePlan& plan, void* stream);
void launch(const TangentProblem& problem, const TangentPlan& plan, void* workspace, void* stream);
void launch(const MergeProblem& problem, const MergePlan& plan, void* stream);
void launch(const CompressProblem& problem, const CompressPlan& plan, void* stream);
void launch(const CacheWriteProblem& problem, const CacheWritePlan& plan, void* stream);

}  // namespace libflash
