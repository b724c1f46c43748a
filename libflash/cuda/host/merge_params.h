// Fills the parameters of the merge kernel from the problem. Host only, no CUDA header.
#pragma once

#include "cuda/merge_plan.h"
#include "problem/merge.h"

namespace libflash::cuda {

RowTensor out_tensor(const MergeProblem& problem, const TensorView& out);
RowTensor lse_tensor(const MergeProblem& problem, const TensorView& lse);

// Refuses more parts, or more different layouts of many parts, than kernel parameters can hold.
MergeParams merge_params(const MergeProblem& problem);

}  // namespace libflash::cuda
