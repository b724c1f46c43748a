// What the plan layer sees of the CUDA backend: the kernels that were compiled, how an architecture plans each operation, and the
// launch of a plan. No CUDA header. The functions are only in builds with the CUDA part (LIBFLASH_BUILD_CUDA in build_info.h).
#pragma once

#include "cuda/architecture.h"
#include "cuda/params.h"

namespace libflash::cuda {

// Enqueues the kernels of a plan on a stream; returns what cudaGetLastError() says then.
template <Operation op>
using Launcher = int (*)(const LaunchPlan<op>&, const LaunchParams<op>&, void* stream);

struct Kernel {
    KernelConfig config;
    const Architecture* architecture = nullptr;
    // Of one step of the operation (ForwardStep, ...) and one template instance; of operations with a single step, step 0.
    KernelResources (*resources)(int step, int instance) = nullptr;
    // Of these the one of the kernel's operation; the others are null.
    Launcher<Operation::merge> merge = nullptr;
    Launcher<Operation::compress> compress = nullptr;
    Launcher<Operation::forward> forward = nullptr;
    Launcher<Operation::backward> backward = nullptr;
    Launcher<Operation::decode> decode = nullptr;
};

// The kernels of this build, in order of preference within an operation. `count` receives the number.
const Kernel* compiled_kernels(int* count);

// Launch `plan` of `kernel` on the problem's device, on `stream`; the caller's current device is the same afterwards. Throw Error
// (CUDA).
void forward(const Kernel& kernel, const AttentionProblem& problem, const ForwardPlan& plan, void* workspace, void* stream);
void backward(const Kernel& kernel, const AttentionProblem& problem, const BackwardPlan& plan, void* workspace, void* stream);
void decode(const Kernel& kernel, const DecodeProblem& problem, const DecodePlan& plan, void* workspace, void* stream);
void merge(const Kernel& kernel, const MergeProblem& problem, const MergePlan& plan, void* stream);
void compress(const Kernel& kernel, const CompressProblem& problem, const CompressPlan& plan, void* stream);

}  // namespace libflash::cuda
