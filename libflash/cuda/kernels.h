// What the rest of the library sees of the CUDA backend: the rows that were compiled, and one function for each operation that turns a
// problem into a launch. No CUDA header. Only in builds with the CUDA part (LIBFLASH_BUILD_CUDA in build_info.h).
#pragma once

#include <cstddef>
#include <string>

#include "cuda/config.h"
#include "cuda/params.h"
#include "problem/build.h"

namespace libflash::cuda {

// Enqueues a kernel on a stream; what cudaGetLastError() says then.
template <Operation op>
using Launcher = int (*)(const LaunchParams<op>&, void* stream);

struct Row {
    KernelConfig config;
    // Of these the one of the row's operation; the others are null.
    Launcher<Operation::merge> merge = nullptr;
    Launcher<Operation::compress> compress = nullptr;
    Launcher<Operation::forward> forward = nullptr;
    Launcher<Operation::backward> backward = nullptr;
    Launcher<Operation::decode> decode = nullptr;
};

// The rows of this build, in order of preference within an operation. `count` receives the number.
const Row* all_rows(int* count);

// What a thread block of the row takes, where that may be more than a device has; else 0.
int shared_bytes(const KernelConfig& config);

// Can the row do what the problem asks for besides its type and head dims? If not, `why`, where given, says what it does not know.
bool knows_options(const KernelConfig& config, const AttentionProblem& problem, std::string* why);

// Refuses what the kernels cannot count.
void check_sizes(const AttentionProblem& problem);
void check_sizes(const DecodeProblem& problem);

// The workspace that forward needs: where thread blocks are given work as they come free.
size_t forward_workspace_bytes(const Row& row, const AttentionProblem& problem);

// The workspace that backward needs.
size_t backward_workspace_bytes(const Row& row, const AttentionProblem& problem);

// Into how many ranges decode cuts the keys of a sequence at most, and how many key heads a thread block takes of one; the workspace for
// the results of ranges and for turned queries.
struct DecodeCut {
    int64_t splits;
    int heads;
};
DecodeCut decode_cut(const Row& row, const DecodeProblem& problem);
size_t decode_workspace_bytes(const Row& row, const DecodeProblem& problem, DecodeCut cut);

// Run `row` on the problem's device, on `stream`; the caller's current device is the same afterwards. Throw Error (CUDA).
void forward(const Row& row, const AttentionProblem& problem, void* workspace, void* stream);
void backward(const Row& row, const AttentionProblem& problem, void* workspace, void* stream);
void decode(const Row& row, const DecodeProblem& problem, DecodeCut cut, void* workspace, void* stream);
void merge(const Row& row, const MergeProblem& problem, void* stream);
void compress(const Row& row, const CompressProblem& problem, void* stream);

}  // namespace libflash::cuda
