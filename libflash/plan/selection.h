// The choice of a kernel: the first one of the registry that accepts the problem. If none accepts it, the error text
// lists the reason of each kernel.
#pragma once

#include <string>

#include "plan/registry.h"
#include "problem/build.h"

namespace libflash {

// The properties of a problem that decide which kernels accept it.
struct Subject {
    Operation operation;
    Device device;
    DType dtype = DType::none;
    int64_t head_dim = 0, head_dim_v = 0;
    const Request* request = nullptr;
    const MergeProblem* merge = nullptr;
    const AttentionProblem* attention = nullptr;  // forward, backward
};
Subject subject_of(const AttentionProblem& problem);
Subject subject_of(const DecodeProblem& problem);
Subject subject_of(const MergeProblem& problem);
Subject subject_of(const CompressProblem& problem);

// Whether `kernel` accepts the problem. If not, writes the reason to `why`; with a null `why` it formats nothing.
bool accepts(const KernelEntry& kernel, const Subject& subject, std::string* why);

const KernelEntry* find_kernel(const Subject& subject);    // nullptr if none accepts
const KernelEntry& choose_kernel(const Subject& subject);  // throws Error: UNSUPPORTED, NO_DEVICE, INVALID
std::string why_no_kernel(const Subject& subject);         // if none accepts

}  // namespace libflash
