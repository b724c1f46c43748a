// The backward plan of sm_90a: one thread block per key tile, and one instance of the kernel.
#include "cuda/host/backward_plan.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {

BackwardPlan plan_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties&) {
    return common_backward_plan(kernel, problem, kPlainInstance);
}

}  // namespace libflash::cuda::sm90
