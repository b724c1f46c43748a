// Merge: launches a plan.
#include "cuda/host/launch.h"
#include "cuda/host/merge_params.h"
#include "cuda/kernels.h"

namespace libflash::cuda {

void merge(const Kernel& kernel, const MergeProblem& problem, const MergePlan& plan, void* stream) {
    const MergeParams params = merge_params(problem);
    const DeviceGuard guard(problem.device.id);
    check(kernel.merge(plan, params, stream), "merge");
}

}  // namespace libflash::cuda
