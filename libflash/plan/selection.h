// The choice of a kernel: the first one of the registry that accepts the problem. If none accepts it, the error text
// lists the reason of each kernel.
#pragma once

#include <string>
#include <vector>

#include "plan/registry.h"
#include "problem/build.h"

namespace libflash {

// The properties of a problem that decide which kernels accept it.
struct KernelQuery {
    Operation operation;
    Device device;
    DType dtype = DType::none;
    int64_t head_dim = 0, head_dim_v = 0;
    const Request* request = nullptr;
    const MergeProblem* merge = nullptr;
    const AttentionProblem* attention = nullptr;  // forward, backward
    const DecodeProblem* decode = nullptr;
    const CacheWriteProblem* cache_write = nullptr;
    const TangentProblem* tangent = nullptr;
};
KernelQuery kernel_query(const AttentionProblem& problem);
KernelQuery kernel_query(const TangentProblem& problem);
KernelQuery kernel_query(const DecodeProblem& problem);
KernelQuery prefill_query(const DecodeProblem& problem);  // for the long chunks
KernelQuery prefix_query(const DecodeProblem& problem);   // for keys that sequences share
KernelQuery kernel_query(const MergeProblem& problem);
KernelQuery kernel_query(const CacheWriteProblem& problem);
KernelQuery kernel_query(const CompressProblem& problem);

// Whether `kernel` accepts the problem. If not, writes the reason to `why`; with a null `why` it formats nothing.
bool accepts(const KernelEntry& kernel, const KernelQuery& query, std::string* why);

// Why kernels do not accept a problem; kernels with the same reason are listed together.
struct KernelReason {
    std::string text;
    std::string names;  // of the kernels, separated by ", "
};
void add_reason(std::vector<KernelReason>& reasons, const std::string& text, const KernelEntry& kernel);

const KernelEntry* find_kernel(const KernelQuery& query);  // nullptr if no kernel accepts the problem
// A backward kernel whose architecture has code for the gradient of the bias, or nullptr. The requested kernel and backend are
// not considered.
const KernelEntry* find_bias_gradient_kernel(const AttentionProblem& problem);
const KernelEntry& choose_kernel(const KernelQuery& query);  // throws Error: UNSUPPORTED, NO_DEVICE, INVALID
std::string why_no_kernel(const KernelQuery& query);         // if no kernel accepts it

}  // namespace libflash
