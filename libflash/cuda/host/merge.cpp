// Merge: launches a plan.
#include "cuda/host/launch.h"
#include "cuda/kernels.h"

namespace libflash::cuda {

void merge(const Kernel& kernel, const MergeProblem& problem, const MergePlan& plan, void* stream) {
    const DeviceGuard guard(problem.device.id);
    check(kernel.merge(plan, *plan.params, stream), "merge");
}

}  // namespace libflash::cuda
