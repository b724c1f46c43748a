// An architecture: its capabilities and plans, defined in its folder (any/, sm80/, sm90/). CMake makes the table of
// architectures from kernels.table. No CUDA header.
#pragma once

#include <string>

#include "cuda/device.h"
#include "cuda/plans.h"
#include "problem/build.h"

namespace libflash::cuda {

struct Kernel;
struct MergePlan;  // merge_plan.h

struct Architecture {
    const char* name;  // of the folder
    bool exact;        // its code runs only on the architecture that it was compiled for ("90a")

    // Whether the kernel supports what the problem requires besides element type and head dims. If not, writes what the kernel
    // lacks to `why`, unless `why` is nullptr.
    bool (*supports)(const KernelConfig&, const AttentionProblem&, std::string* why);
    // The same for kernels of decode, prefill and decode_prefix, and for kernels of tangents. nullptr: the architecture has no
    // such kernel.
    bool (*supports_decode)(const KernelConfig&, const DecodeProblem&, std::string* why);
    bool (*supports_tangent)(const KernelConfig&, const TangentProblem&, std::string* why);
    // Bytes of shared memory per thread block, if they may exceed the limit of a device; else 0.
    int (*shared_bytes)(const KernelConfig&);

    // Make the plan of an operation. nullptr: the architecture has no kernel of the operation. A problem that exceeds the size
    // limits of the kernels is refused.
    ForwardPlan (*plan_forward)(const Kernel&, const AttentionProblem&, const DeviceProperties&);
    BackwardPlan (*plan_backward)(const Kernel&, const AttentionProblem&, const DeviceProperties&);
    // The launch of the gradient of the bias by a backward kernel. nullptr: the architecture has no code for it, and a kernel of
    // another architecture computes it.
    LaunchShape (*plan_bias_gradient)(const Kernel&, const AttentionProblem&);
    // `prefill`: the kernel for long chunks, if there is one (plans.h).
    DecodePlan (*plan_decode)(const Kernel&, const DecodeProblem&, const DeviceProperties&, const DecodePrefill& prefill);
    PrefillPlan (*plan_prefill)(const Kernel&, const DecodeProblem&, const DeviceProperties&);
    // Changes the decode plan so that this kernel computes the keys that sequences share.
    void (*plan_prefix)(DecodePlan&, const Kernel&, const DecodeProblem&, const DeviceProperties&);
    ForwardTangentPlan (*plan_forward_tangent)(const Kernel&, const TangentProblem&, const DeviceProperties&);
    BackwardTangentPlan (*plan_backward_tangent)(const Kernel&, const TangentProblem&, const DeviceProperties&);
    MergePlan (*plan_merge)(const Kernel&, const MergeProblem&, const DeviceProperties&);
    CompressPlan (*plan_compress)(const Kernel&, const CompressProblem&, const DeviceProperties&);
    CacheWritePlan (*plan_cache_write)(const Kernel&, const CacheWriteProblem&, const DeviceProperties&);
};

// The architecture of that name, which must be in the table.
const Architecture& find_architecture(const char* name);

}  // namespace libflash::cuda
