// Forward: from the problem to the parameters of the kernel, and its launch.
#include <cstring>

#include "cuda/attention/fill_params.h"
#include "cuda/attention/fill_schedule.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace libflash::cuda {
namespace {

bool on_sm90(const KernelConfig& config) { return std::strcmp(config.room, "sm90") == 0; }

// What a tile takes is not known before the launch; on sm90, where thread blocks stay, they are then given tiles as they come free.
bool is_given_out(const AttentionProblem& problem, const KernelConfig& config) {
    const auto lengths_on_device = [](const Sequences& rows) { return rows.packed() || rows.used; };
    return on_sm90(config) &&
           (lengths_on_device(problem.q_rows) || lengths_on_device(problem.k_rows) || problem.block_mask.present);
}

ScheduleParams schedule(const AttentionProblem& problem, const KernelConfig& config) {
    // Later rows see more keys under a causal rule: the longest first, or, where a thread block's work is settled beforehand, long with short.
    const bool causal = problem.mask_rule.right < MaskRule::kUnbounded;
    const bool paired = causal && on_sm90(config) && !is_given_out(problem, config);
    // As if a head filled the cache: then one head comes after the other, and those at work share its keys and values at once.
    const double head_bytes = on_sm90(config) ? kL2Bytes : key_bytes(problem);
    ScheduleParams params = schedule_params(problem.q_rows, problem.batch, problem.heads_q, config.tile_q * (paired ? 2 : 1),
                                            head_bytes, causal && !paired);
    params.paired = paired;
    return params;
}

ForwardParams make_params(const AttentionProblem& problem, const KernelConfig& config) {
    ForwardParams params{};
    fill_in_problem(params, problem);
    params.block_mask = block_mask_params(problem.block_mask, true);
    params.schedule = schedule(problem, config);
    const int64_t dim = problem.head_dim, dim_v = problem.head_dim_v, element = element_bytes(problem.dtype);
    params.vector_loads =
        in_vectors(params.q, dim, element) && in_vectors(params.k, dim, element) && in_vectors(params.v, dim_v, element);
    params.vector_out = in_vectors(params.out, dim_v, element);
    params.general = has_rare_options(problem) || !params.vector_loads;
    return params;
}

bool nothing_to_do(const AttentionProblem& problem) {
    return problem.batch == 0 || problem.heads_q == 0 || problem.q_rows.capacity == 0;
}

}  // namespace

size_t forward_workspace_bytes(const Row& row, const AttentionProblem& problem) {
    if (nothing_to_do(problem) || !is_given_out(problem, row.config)) return 0;
    const ScheduleParams params = schedule(problem, row.config);
    return work_order_bytes(problem.batch, int64_t{params.heads} * params.tiles);
}

void forward(const Row& row, const AttentionProblem& problem, void* workspace, void* stream) {
    if (nothing_to_do(problem)) return;
    ForwardParams params = make_params(problem, row.config);
    if (is_given_out(problem, row.config)) params.work_order = static_cast<int32_t*>(workspace);
    const DeviceGuard guard(problem.device.id);
    check(row.forward(params, stream), row.config.name);
}

}  // namespace libflash::cuda
