// The interface of the CUDA backend for the plan layer: the compiled kernels and the launch of a plan. No CUDA header. The
// functions exist only in builds with CUDA (LIBFLASH_BUILD_CUDA in build_info.h).
#pragma once

#include "cuda/architecture.h"
#include "cuda/merge_plan.h"
#include "cuda/params.h"
#include "cuda/tangent_instance.h"

namespace libflash::cuda {

// Enqueues the kernels of a plan on a stream and returns the result of cudaGetLastError().
template <Operation op>
using Launcher = int (*)(const LaunchPlan<op>&, const LaunchParams<op>&, void* stream);

struct Kernel {
    KernelConfig config;
    const Architecture* architecture = nullptr;
    // The resources of one step of the operation (ForwardStep, ...) and one instance; step 0 if the operation has only one.
    KernelResources (*resources)(int step, int instance) = nullptr;
    // The launcher of the kernel's operation; the others are nullptr.
    Launcher<Operation::merge> merge = nullptr;
    Launcher<Operation::compress> compress = nullptr;
    Launcher<Operation::cache_write> cache_write = nullptr;
    Launcher<Operation::forward> forward = nullptr;
    Launcher<Operation::backward> backward = nullptr;
    Launcher<Operation::decode> decode = nullptr;
    Launcher<Operation::prefill> prefill = nullptr;
    Launcher<Operation::decode_prefix> decode_prefix = nullptr;
    Launcher<Operation::forward_tangent> forward_tangent = nullptr;
    Launcher<Operation::backward_tangent> backward_tangent = nullptr;
};

// The kernels of this build, in order of preference within an operation. Writes their number to `count`.
const Kernel* compiled_kernels(int* count);

// Launch `plan` of `kernel` on `stream` of the problem's device; the caller's current device does not change. A CUDA error
// becomes an Error with FLASH_STATUS_CUDA.
void forward(const Kernel& kernel, const AttentionProblem& problem, const ForwardPlan& plan, void* workspace, void* stream);
void backward(const Kernel& kernel, const AttentionProblem& problem, const BackwardPlan& plan, void* workspace, void* stream);
void decode(const Kernel& kernel, const DecodeProblem& problem, const DecodePlan& plan, void* workspace, void* stream);
// Writes the schedule of the problem. The plan must have a prefill kernel.
void decode_schedule(const DecodeProblem& problem, const DecodePlan& plan, void* stream);
// out and lse of the problem hold the result of forward, unless is_fused(plan).
void forward_tangent(const Kernel& kernel, const TangentProblem& problem, const ForwardTangentPlan& plan, void* stream);
void backward_tangent(const Kernel& kernel, const TangentProblem& problem, const BackwardTangentPlan& plan, void* workspace,
                      void* stream);
void merge(const Kernel& kernel, const MergeProblem& problem, const MergePlan& plan, void* stream);
void compress(const Kernel& kernel, const CompressProblem& problem, const CompressPlan& plan, void* stream);
void cache_write(const Kernel& kernel, const CacheWriteProblem& problem, const CacheWritePlan& plan, void* stream);

}  // namespace libflash::cuda
