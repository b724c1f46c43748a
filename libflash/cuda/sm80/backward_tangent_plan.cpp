// The plan of backward_tangent for sm_80 and later: statistics of the query rows, then a kernel for each of tdq, tdk and tdv. A
// separate launch of the same kernel computes the tangent of dbias.
#include "cuda/host/backward_plan.h"
#include "cuda/host/limits.h"
#include "cuda/host/tangent_params.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/sm80/plan.h"

namespace libflash::cuda::sm80 {
namespace {

// Bytes of q, dout and their tangents that the thread blocks of a key head read.
double query_bytes(const TangentProblem& problem) {
    const auto row_bytes = static_cast<double>(2 * element_bytes(problem.dtype) * (problem.head_dim + problem.head_dim_v));
    return row_bytes * static_cast<double>(problem.q_rows.max_length * problem.group_size());
}

void plan_schedules(BackwardTangentPlan& plan, const TangentProblem& problem) {
    const bool longest_last = problem.mask_rule.right < MaskRule::kUnbounded;
    plan.unit_schedule = schedule_params(problem.q_rows, problem.batch, problem.heads_q, kUnitRows, kL2Bytes, false);
    plan.query_schedule =
        schedule_params(problem.q_rows, problem.batch, problem.heads_q, plan.tile_q, 2 * key_bytes(problem), longest_last);
    plan.key_schedule = schedule_params(problem.k_rows, problem.batch, problem.heads_k, plan.tile_q, query_bytes(problem), false);
}

}  // namespace

BackwardTangentPlan plan_backward_tangent(const Kernel& kernel, const TangentProblem& problem, const DeviceProperties& device) {
    check_sizes(problem);
    BackwardTangentPlan plan;
    const Tangents& tangents = problem.tangents;
    plan.tile_q = kernel.config.tile_q;
    plan.tile_k = kernel.config.tile_k;
    plan.units = units_of(problem);
    const auto fits = [&](const TensorView& x, int64_t channels) { return optional_fits_vectors(problem, x, channels); };
    plan.vector_loads =
        tangents_load_in_vectors(problem) && fits(problem.dout, problem.head_dim_v) && fits(tangents.dout, problem.head_dim_v);
    plan.vector_rows = outputs_load_in_vectors(problem);
    plan.vector_out =
        fits(tangents.dq, problem.head_dim) && fits(tangents.dk, problem.head_dim) && fits(tangents.dv, problem.head_dim_v);
    const bool is_double = kernel.config.dtype == KernelType::f64_;
    const size_t of_row = is_double ? sizeof(DoubleTangentStatistics) : sizeof(TangentStatistics);
    plan.workspace.add("statistics", workspace_rows(plan.units, problem) * of_row);
    add_first_units(plan.workspace, problem);
    plan_schedules(plan, problem);
    const auto launch = [&](const char* argument, BackwardTangentStep step, int64_t blocks) {
        check_block_count(argument, blocks);
        return launch_shape(blocks, kernel.resources(static_cast<int>(step), plan.instance.number));
    };
    plan.statistics = launch("q", BackwardTangentStep::statistics, blocks_of(plan.unit_schedule));
    plan.tdq = launch("q", BackwardTangentStep::gradients, blocks_of(plan.query_schedule));
    plan.tdk = plan.tdv = launch("k", BackwardTangentStep::gradients, blocks_of(plan.key_schedule));
    balance_key_tiles(plan.key_schedule, problem, resident_blocks(device, plan.tdk));
    if (tangents.dsink.present) plan.dsink = launch("q", BackwardTangentStep::dsink, problem.heads_q);
    if (tangents.dbias.present) {
        const int64_t tiles = tiles_of_bias(tangents.dbias, plan.tile_q, plan.tile_k);
        plan.dbias = launch("tangents.dbias", BackwardTangentStep::gradients, tiles);
    }
    return plan;
}

}  // namespace libflash::cuda::sm80
