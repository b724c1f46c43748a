// How backward will be done on sm_90a: a thread block for each tile of keys; the kernel has one instance.
#include "cuda/host/backward_plan.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {

BackwardPlan plan_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties&) {
    return common_backward_plan(kernel, problem, kPlainInstance);
}

}  // namespace libflash::cuda::sm90
