// forward_tangent: fills the kernel parameters from the problem and the plan, and launches the kernel.
#include "cuda/host/launch.h"
#include "cuda/host/tangent_params.h"
#include "cuda/kernels.h"

namespace libflash::cuda {
namespace {

ForwardTangentParams make_params(const TangentProblem& problem, const ForwardTangentPlan& plan) {
    ForwardTangentParams params{};
    fill_in_tangents(params, problem);
    params.block_mask = block_mask_params(problem.block_mask, true);
    params.schedule = plan.schedule;
    params.vector_loads = plan.vector_loads;
    params.vector_rows = plan.vector_rows;
    params.vector_out = plan.vector_out;
    return params;
}

}  // namespace

void forward_tangent(const Kernel& kernel, const TangentProblem& problem, const ForwardTangentPlan& plan, void* stream) {
    if (plan.attention.blocks == 0) return;
    const ForwardTangentParams params = make_params(problem, plan);
    const DeviceGuard guard(problem.device.id);
    check(kernel.forward_tangent(plan, params, stream), kernel.config.name);
}

}  // namespace libflash::cuda
