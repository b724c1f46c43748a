// The options of a call that has a part of a problem (a shard), which no CUDA kernel supports yet.
#pragma once

#include <string>

#include "problem/attention.h"

namespace libflash::cuda {

// Whether the problem has none of them. If it has one, writes its name to `why`, unless that is nullptr.
bool has_no_shard_options(const AttentionProblem& problem, std::string* why);

}  // namespace libflash::cuda
