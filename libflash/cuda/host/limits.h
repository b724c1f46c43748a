// The size limits of the CUDA kernels. Host only, no CUDA header.
#pragma once

#include "problem/attention.h"
#include "problem/decode.h"

namespace libflash::cuda {

// Refuse problems with too many rows, heads or thread blocks.
void check_sizes(const AttentionProblem& problem);
void check_sizes(const DecodeProblem& problem);

}  // namespace libflash::cuda
