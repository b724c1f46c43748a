// backward_tangent: fills the kernel parameters from the problem and the plan, and launches the kernels.
#include "cuda/host/launch.h"
#include "cuda/host/tangent_params.h"
#include "cuda/kernels.h"

namespace libflash::cuda {
namespace {

BackwardTangentParams make_params(const TangentProblem& problem, const BackwardTangentPlan& plan, char* workspace) {
    BackwardTangentParams params{};
    fill_in_tangents(params, problem);
    params.heads_k = static_cast<int32_t>(problem.heads_k);
    params.tdq = rows_params(problem.tangents.dq);
    params.tdk = rows_params(problem.tangents.dk);
    params.tdv = rows_params(problem.tangents.dv);
    params.tdsink = head_gradient_params(problem.tangents.dsink);
    params.tdbias = score_gradient_params(problem.tangents.dbias);
    params.block_rows = block_mask_params(problem.block_mask, true);
    params.block_cols = block_mask_params(problem.block_mask, false);
    params.statistics = reinterpret_cast<TangentStatistics*>(workspace + plan.workspace.offset("statistics"));
    if (plan.dynamic) params.next_tiles = reinterpret_cast<int32_t*>(workspace + plan.workspace.offset("next_tiles"));
    params.units = static_cast<int32_t>(plan.units);
    if (problem.q_rows.packed())
        params.first_units = reinterpret_cast<int32_t*>(workspace + plan.workspace.offset("first_units"));
    params.unit_schedule = plan.unit_schedule;
    params.query_schedule = plan.query_schedule;
    params.key_schedule = plan.key_schedule;
    params.part.end_row = INT32_MAX;
    params.vector_loads = plan.vector_loads;
    params.vector_rows = plan.vector_rows;
    params.vector_out = plan.vector_out;
    if (problem.heads_q == 0) leave_out_queries(params);
    return params;
}

}  // namespace

void backward_tangent(const Kernel& kernel, const TangentProblem& problem, const BackwardTangentPlan& plan, void* workspace,
                      void* stream) {
    const BackwardTangentParams params = make_params(problem, plan, static_cast<char*>(workspace));
    const DeviceGuard guard(problem.device.id);
    check(kernel.backward_tangent(plan, params, stream), kernel.config.name);
}

}  // namespace libflash::cuda
