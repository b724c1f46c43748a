// The hint that sequences of a decode call share their first keys: shared_groups and shared_lens.
#pragma once

#include "problem/decode.h"
#include "problem/read.h"

namespace libflash {

// Called when the sequences of the problem are known.
void build_shared_keys(DecodeProblem& problem, const TensorView& groups, const TensorView& lens);

// Refuses a hint that is not true. Reads the arrays, so it is for host tensors only. Called after check_cache_contents().
void check_shared_keys(const DecodeProblem& problem);

}  // namespace libflash
