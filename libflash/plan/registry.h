// The kernels of this build, in order of preference for each operation, and the choice among them: the first that accepts. Every
// row that declines says why; if none accepts, the reasons are the error.
#pragma once

#include <cstdint>
#include <string>

#include "cpu/kernels.h"
#include "problem/build.h"

namespace libflash {

namespace cuda {
struct Row;
}

enum class Operation { forward, backward, decode, merge, compress };
const char* operation_name(Operation operation);

struct KernelRow {
    char name[48];
    Operation operation;
    const char* backend;  // "any": every CUDA device, whichever CUDA backend is asked for
    const char* dtype;
    int32_t head_dim, head_dim_v;
    int32_t tile_q, tile_k, stages;
    const cpu::Kernels* cpu;    // CPU: forward, backward, decode
    const cuda::Row* cuda;      // CUDA
    const char* architectures;  // CUDA: for which there is code
    bool specific;              // CUDA: only code for exactly this architecture ("90a") will do
    bool processor_has_it;      // CPU
};

int kernel_count();
const KernelRow& kernel_row(int index);

// Can this machine run it? If not, `why_not` says it; valid as long as the library is loaded.
bool usable_here(const KernelRow& row, const char** why_not);

// The part of a problem by which rows accept or decline.
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
bool accepts(const KernelRow& row, const Subject& subject, std::string* why);

const KernelRow* find_kernel(const Subject& subject);    // nullptr: none accepts
const KernelRow& choose_kernel(const Subject& subject);  // or UNSUPPORTED, NO_DEVICE, INVALID
std::string why_no_kernel(const Subject& subject);

}  // namespace libflash
