#include "cuda/host/backward_plan.h"

#include <algorithm>

#include "cuda/host/limits.h"
#include "cuda/host/long_sums.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"

namespace libflash::cuda {

namespace {

bool fits_vectors(const AttentionProblem& problem, const TensorView& tensor, int64_t channels) {
    return rows_fit_vectors(rows_params(tensor), channels, element_bytes(problem.dtype));
}

bool stores_in_vectors(const AttentionProblem& problem) {
    const auto fits = [&](const TensorView& tensor, int64_t channels) {
        return rows_fit_vectors(rows_params(tensor), channels, is_wide(problem, tensor) ? 4 : element_bytes(problem.dtype));
    };
    return fits(problem.dq, problem.head_dim) && fits(problem.dk, problem.head_dim) && fits(problem.dv, problem.head_dim_v);
}

Workspace workspace_of(const BackwardPlan& plan, const AttentionProblem& problem, const KernelConfig& config) {
    const size_t rows = workspace_rows(plan.units, problem);
    Workspace workspace;
    workspace.add("statistics", rows * (config.dtype == KernelType::f64_ ? sizeof(DoubleStatistics) : sizeof(SoftmaxStatistics)));
    add_first_units(workspace, problem);
    if (!plan.dq_kernel) workspace.add("dq_accumulator", rows * static_cast<size_t>(config.head_dim) * sizeof(float));
    return workspace;
}

ScheduleParams key_schedule(const AttentionProblem& problem, const KernelConfig& config) {
    const auto row_bytes = static_cast<double>(query_row_bytes(problem, config.head_dim));
    const double head_bytes = row_bytes * static_cast<double>(problem.q_rows.max_length * problem.group_size());
    return schedule_params(problem.k_rows, problem.batch, problem.heads_k, config.tile_k, head_bytes, false);
}

}  // namespace

int64_t tiles_of_bias(const ScoreTensor& bias, int tile_q, int tile_k) {
    return bias.shape[0] * bias.shape[1] * ceil_div(bias.shape[2], tile_q) * ceil_div(bias.shape[3], tile_k);
}

int64_t units_of(const AttentionProblem& problem) {
    const Sequences& rows = problem.q_rows;
    return rows.packed() ? rows.capacity / kUnitRows + problem.batch : ceil_div(rows.capacity, kUnitRows);
}

void add_first_units(Workspace& workspace, const AttentionProblem& problem) {
    if (problem.q_rows.packed()) workspace.add("first_units", static_cast<size_t>(problem.batch) * sizeof(int32_t));
}

size_t workspace_rows(int64_t units, const AttentionProblem& problem) {
    const int64_t heads = problem.q_rows.packed() ? problem.heads_q : problem.batch * problem.heads_q;
    return static_cast<size_t>(heads * units * kUnitRows);
}

bool backward_loads_in_vectors(const AttentionProblem& problem) {
    return loads_in_vectors(problem) && fits_vectors(problem, problem.out, problem.head_dim_v) &&
           fits_vectors(problem, problem.dout, problem.head_dim_v);
}

int64_t resident_blocks(const DeviceProperties& device, const LaunchShape& shape) {
    constexpr int kReserved = 1024;  // bytes of shared memory that CUDA uses in each thread block
    const int fit = (device.shared_memory_bytes + kReserved) / (shape.shared_bytes + kReserved);
    return int64_t{device.multiprocessors} * std::clamp(fit, 1, 2);
}

LaunchShape backward_launch(const Kernel& kernel, const BackwardPlan& plan, BackwardStep step, int64_t blocks) {
    return launch_shape(blocks, kernel.resources(static_cast<int>(step), plan.instance.number));
}

BackwardPlan common_backward_plan(const Kernel& kernel, const AttentionProblem& problem, const Instance& instance,
                                  const DeviceProperties& device, bool dq_kernel) {
    check_sizes(problem);
    const KernelConfig& config = kernel.config;
    BackwardPlan plan;
    plan.instance = instance;
    plan.tile_q = config.tile_q;
    plan.tile_k = config.tile_k;
    plan.dq_kernel = dq_kernel;
    plan.units = units_of(problem);
    plan.workspace = workspace_of(plan, problem, config);
    plan.vector_loads = backward_loads_in_vectors(problem);
    plan.vector_out = stores_in_vectors(problem);
    plan.key_schedule = key_schedule(problem, config);
    plan.query_schedule = schedule_params(problem.q_rows, problem.batch, problem.heads_q, kUnitRows, kL2Bytes, false);
    const auto launch = [&](BackwardStep step, int64_t blocks) { return backward_launch(kernel, plan, step, blocks); };
    plan.statistics = launch(BackwardStep::statistics, blocks_of(plan.query_schedule));
    plan.key_tiles = blocks_of(plan.key_schedule);
    check_block_count("k", plan.key_tiles);
    plan.dk_dv = launch(BackwardStep::dk_dv, plan.key_tiles);
    plan_gradient_sums(plan, config, problem, device.multiprocessors);
    if (!dq_kernel) plan.dq_conversion = launch(BackwardStep::dq_conversion, blocks_of(plan.query_schedule));
    if (problem.dsink.present) plan.dsink = launch(BackwardStep::dsink, problem.heads_q);
    return plan;
}

}  // namespace libflash::cuda
