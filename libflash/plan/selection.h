// The choice of a kernel: the first of the registry that accepts the problem. Every other one says why it does not; if none
// accepts, the reasons are the error.
#pragma once

#include <string>

#include "plan/registry.h"
#include "problem/build.h"

namespace libflash {

// The part of a problem by which kernels accept or decline.
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

// Nothing is formatted unless `why` is given.
bool accepts(const KernelEntry& kernel, const Subject& subject, std::string* why);

const KernelEntry* find_kernel(const Subject& subject);    // nullptr: none accepts
const KernelEntry& choose_kernel(const Subject& subject);  // or UNSUPPORTED, NO_DEVICE, INVALID
std::string why_no_kernel(const Subject& subject);

}  // namespace libflash
