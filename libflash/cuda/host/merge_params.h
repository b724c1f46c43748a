// Fills the parameters of the merge kernel from the problem. Host only, no CUDA header.
#pragma once

#include "cuda/params.h"
#include "problem/merge.h"

namespace libflash::cuda {

MergeParams merge_params(const MergeProblem& problem);

}  // namespace libflash::cuda
