// Forward: from the problem to the parameters of the kernel, and its launch.
#include "cuda/attention/fill_params.h"
#include "cuda/attention/fill_schedule.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace libflash::cuda {
namespace {

constexpr double kLog2e = 1.4426950408889634;
ScheduleParams schedule(const AttentionProblem& problem, const KernelConfig& config) {
    // Later rows see more keys under a causal rule: the longest first.
    return schedule_params(problem.q_rows, problem.batch, problem.heads_q, config.tile_q, key_bytes(problem),
                           problem.mask_rule.right < MaskRule::kUnbounded);
}

ForwardParams make_params(const AttentionProblem& problem, const KernelConfig& config) {
    ForwardParams params{};
    params.q = rows_params(problem.q);
    params.k = rows_params(problem.k);
    params.v = rows_params(problem.v);
    params.out = rows_params(problem.out);
    params.lse = row_numbers_params(problem.lse);
    params.q_lengths = lengths_params(problem.q_rows);
    params.k_lengths = lengths_params(problem.k_rows);
    params.batch = static_cast<int32_t>(problem.batch);
    params.heads_q = static_cast<int32_t>(problem.heads_q);
    params.group_size = static_cast<int32_t>(problem.group_size());
    params.head_dim = static_cast<int32_t>(problem.head_dim);
    params.head_dim_v = static_cast<int32_t>(problem.head_dim_v);
    params.softmax_scale = static_cast<float>(problem.softmax_scale);
    params.scale_log2 = static_cast<float>(problem.softmax_scale * kLog2e);
    params.mask = mask_params(problem.mask_rule);
    params.block_mask = block_mask_params(problem.block_mask, true);
    params.sink = head_params(problem.sink);
    params.rare = rare_params(problem);
    params.schedule = schedule(problem, config);
    params.vector_loads = in_vectors(params.q, problem.head_dim, 2) && in_vectors(params.k, problem.head_dim, 2) &&
                          in_vectors(params.v, problem.head_dim_v, 2);
    params.vector_out = in_vectors(params.out, problem.head_dim_v, 2);
    params.general = has_rare_options(problem) || !params.vector_loads;
    return params;
}

}  // namespace

void forward(const Row& row, const AttentionProblem& problem, void* stream) {
    if (problem.batch == 0 || problem.heads_q == 0 || problem.q_rows.capacity == 0) return;
    const ForwardParams params = make_params(problem, row.config);
    const DeviceGuard guard(problem.device.id);
    check(row.forward(params, stream), row.config.name);
}

}  // namespace libflash::cuda
