// The backward plan of sm_90a: one thread block per key tile.
#include "cuda/host/backward_plan.h"
#include "cuda/host/problem_params.h"
#include "cuda/sm90/backward_instance.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {

BackwardPlan plan_backward(const Kernel& kernel, const AttentionProblem& problem, const DeviceProperties& device) {
    const BackwardInstance kind =
        backward_instance(rare_option(problem), has_lengths_on_device(problem), problem.block_mask.present);
    return common_backward_plan(kernel, problem, {static_cast<int>(kind), backward_kind_name(kind)}, device);
}

}  // namespace libflash::cuda::sm90
