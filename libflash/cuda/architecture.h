// What an architecture can do: data and functions that stand in its folder (any/, sm80/, sm90/). One table lists the
// architectures; it is made from the names of the folders in kernels.table. No CUDA header.
#pragma once

#include <string>

#include "cuda/device.h"
#include "cuda/plans.h"
#include "problem/build.h"

namespace libflash::cuda {

struct Kernel;

struct Architecture {
    const char* name;  // of its folder
    bool exact;        // its code runs on exactly the architecture it was compiled for ("90a")

    // Whether the kernel can do what the problem asks for besides its type and head dims. If not, `why`, where given, says what
    // it lacks.
    bool (*supports)(const KernelConfig&, const AttentionProblem&, std::string* why);
    // Shared memory that a thread block of the kernel takes, where that may be more than a device has; else 0.
    int (*shared_bytes)(const KernelConfig&);

    // nullptr where the architecture has no kernel of the operation. They refuse what the kernels cannot count.
    ForwardPlan (*plan_forward)(const Kernel&, const AttentionProblem&, const DeviceProperties&);
    BackwardPlan (*plan_backward)(const Kernel&, const AttentionProblem&, const DeviceProperties&);
    DecodePlan (*plan_decode)(const Kernel&, const DecodeProblem&, const DeviceProperties&);
    MergePlan (*plan_merge)(const Kernel&, const MergeProblem&, const DeviceProperties&);
    CompressPlan (*plan_compress)(const Kernel&, const CompressProblem&, const DeviceProperties&);
};

// The one of that name; it is in the table.
const Architecture& find_architecture(const char* name);

}  // namespace libflash::cuda
