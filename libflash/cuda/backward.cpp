// Backward: from the problem to the parameters of the kernels, their workspace, and their launch.
#include "cuda/attention/fill_params.h"
#include "cuda/attention/fill_schedule.h"
#include "cuda/attention/shared_bytes.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "plan/workspace.h"

namespace libflash::cuda {
namespace {

// Units of workspace rows of a head; see QueryUnits.
int64_t units_of(const AttentionProblem& problem) {
    const Sequences& rows = problem.q_rows;
    return rows.packed() ? rows.capacity / kUnitRows + problem.batch : ceil_div(rows.capacity, kUnitRows);
}

Workspace workspace_of(const Row& row, const AttentionProblem& problem) {
    const Sequences& rows = problem.q_rows;
    const int64_t heads = rows.packed() ? problem.heads_q : problem.batch * problem.heads_q;
    const size_t all = static_cast<size_t>(heads * units_of(problem) * kUnitRows);
    Workspace workspace;
    workspace.add("row_facts", all * sizeof(RowFacts));
    if (!problem.request.deterministic) workspace.add("dq_sums", all * static_cast<size_t>(row.config.head_dim) * sizeof(float));
    return workspace;
}

ScheduleParams key_schedule(const AttentionProblem& problem, const KernelConfig& config) {
    const double element = static_cast<double>(element_bytes(problem.dtype));
    const double row_bytes = element * static_cast<double>(problem.head_dim + problem.head_dim_v) + 4.0 * config.head_dim;
    const double head_bytes = row_bytes * static_cast<double>(problem.q_rows.max_length * problem.group_size());
    return schedule_params(problem.k_rows, problem.batch, problem.heads_k, config.tile_k, head_bytes, false);
}

HeadGradientParams head_gradient_params(const HeadTensor& tensor) {
    if (!tensor.present) return {};
    return {tensor.data, tensor.head_stride, tensor.dtype == DType::f32};
}

ScoreGradientParams score_gradient_params(const ScoreTensor& tensor) {
    ScoreGradientParams params{};
    if (!tensor.present) return params;
    params.data = tensor.data;
    params.is_float = tensor.dtype == DType::f32;
    for (int i = 0; i < 4; ++i) {
        params.stride[i] = tensor.stride[i];
        params.extent[i] = static_cast<int32_t>(tensor.shape[i]);
    }
    return params;
}

// After fill_in_problem().
void fill_in_gradients(BackwardParams& params, const AttentionProblem& problem) {
    params.dout = rows_params(problem.dout);
    params.dq = rows_params(problem.dq);
    params.dk = rows_params(problem.dk);
    params.dv = rows_params(problem.dv);
    params.dlse = row_numbers_params(problem.dlse);
    params.dsink = head_gradient_params(problem.dsink);
    params.dbias = score_gradient_params(problem.dbias);
    const int64_t dim = problem.head_dim, dim_v = problem.head_dim_v, element = element_bytes(problem.dtype);
    const auto fits = [&](const RowsParams& rows, int64_t channels) { return in_vectors(rows, channels, element); };
    params.vector_loads = fits(params.q, dim) && fits(params.k, dim) && fits(params.v, dim_v) && fits(params.out, dim_v) &&
                          fits(params.dout, dim_v);
    params.vector_out = fits(params.dq, dim) && fits(params.dk, dim) && fits(params.dv, dim_v);
}

BackwardParams make_params(const AttentionProblem& problem, const KernelConfig& config) {
    BackwardParams params{};
    fill_in_problem(params, problem);
    fill_in_gradients(params, problem);
    params.heads_k = static_cast<int32_t>(problem.heads_k);
    params.block_rows = block_mask_params(problem.block_mask, true);
    params.block_cols = block_mask_params(problem.block_mask, false);
    params.units = static_cast<int32_t>(units_of(problem));
    params.key_schedule = key_schedule(problem, config);
    params.query_schedule = schedule_params(problem.q_rows, problem.batch, problem.heads_q, kUnitRows, kL2Bytes, false);
    params.general = has_rare_options(problem) || !params.vector_loads;
    params.query_tile_schedule =
        schedule_params(problem.q_rows, problem.batch, problem.heads_q,
                        backward_query_tile(config.head_dim, params.general, element_bytes(config.dtype)), key_bytes(problem),
                        problem.mask_rule.right < MaskRule::kUnbounded);
    return params;
}

}  // namespace

size_t backward_workspace_bytes(const Row& row, const AttentionProblem& problem) { return workspace_of(row, problem).bytes(); }

void backward(const Row& row, const AttentionProblem& problem, void* workspace, void* stream) {
    if (problem.batch == 0 || problem.heads_q == 0) return;
    BackwardParams params = make_params(problem, row.config);
    const Workspace regions = workspace_of(row, problem);
    char* const base = static_cast<char*>(workspace);
    params.row_facts = reinterpret_cast<RowFacts*>(base + regions.offset("row_facts"));
    if (!problem.request.deterministic) params.dq_sums = reinterpret_cast<float*>(base + regions.offset("dq_sums"));
    const DeviceGuard guard(problem.device.id);
    check(row.backward(params, stream), row.config.name);
}

}  // namespace libflash::cuda
