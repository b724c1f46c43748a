// The size limits of the CUDA kernels. Host only, no CUDA header.
#pragma once

#include "problem/attention.h"
#include "problem/decode.h"

namespace libflash::cuda {

// Refuse problems with too many rows, heads or thread blocks.
void check_sizes(const AttentionProblem& problem);
void check_sizes(const DecodeProblem& problem);

// Refuses more thread blocks than a launch can have. check_sizes() refuses them already for tiles of 32 rows and more.
void check_block_count(const char* argument, int64_t blocks);

}  // namespace libflash::cuda
