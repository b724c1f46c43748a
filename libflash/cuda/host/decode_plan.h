// The parts of a plan of decode that every architecture has: workspace, and the launches of append, attention and combine. Host
// only, no CUDA header.
#pragma once

#include "cuda/host/decode_splits.h"
#include "cuda/kernels.h"

namespace libflash::cuda {

bool has_codes(const DecodeProblem& problem);
DecodeStorage storage_of(const DecodeProblem& problem);
// Whether new rows are more than elements of the type of the queries (sm80/append_codes.cuh).
bool appends_codes(const DecodeProblem& problem);

Workspace decode_workspace(const DecodePlan& plan, const KernelConfig& config, const DecodeProblem& problem);
// The kernel that appends and rotates new rows and rotates the queries, if it is needed.
void plan_append(DecodePlan& plan, const Kernel& kernel, const DecodeProblem& problem);
void plan_attention(DecodePlan& plan, const Kernel& kernel, const DecodeSizes& sizes);

}  // namespace libflash::cuda
