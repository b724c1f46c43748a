// The parts of a decode plan that all architectures share: workspace, and the launches of append, attention and combine. Host
// only, no CUDA header.
#pragma once

#include "cuda/host/decode_splits.h"
#include "cuda/kernels.h"

namespace libflash::cuda {

bool has_codes(const DecodeProblem& problem);
DecodeStorage storage_of(const DecodeProblem& problem);
// Whether new rows are stored as codes or with scales, or have a rope part, so that sm80/append_codes.cuh appends them.
bool appends_codes(const DecodeProblem& problem);

Workspace decode_workspace(const DecodePlan& plan, const KernelConfig& config, const DecodeProblem& problem);
// Plans the kernels that append and rotate new rows and rotate the queries, if they are needed.
void plan_append(DecodePlan& plan, const Kernel& kernel, const DecodeProblem& problem);
void plan_attention(DecodePlan& plan, const Kernel& kernel, const DecodeSizes& sizes);

}  // namespace libflash::cuda
