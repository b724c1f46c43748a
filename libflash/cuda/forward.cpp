// Forward: from the problem to the parameters of the kernel, and its launch.
#include <cstring>

#include "cuda/attention/fill_params.h"
#include "cuda/attention/fill_schedule.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace libflash::cuda {
namespace {

ScheduleParams schedule(const AttentionProblem& problem, const KernelConfig& config) {
    // Later rows see more keys under a causal rule: the longest first, or, where a thread block's work is settled beforehand, long with short.
    const bool causal = problem.mask_rule.right < MaskRule::kUnbounded;
    const bool settled = std::strcmp(config.room, "sm90") == 0, paired = causal && settled && !problem.q_rows.packed();
    // As if a head filled the cache: then one head comes after the other, and those at work share its keys and values at once.
    const double head_bytes = settled ? kL2Bytes : key_bytes(problem);
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

}  // namespace

void forward(const Row& row, const AttentionProblem& problem, void* stream) {
    if (problem.batch == 0 || problem.heads_q == 0 || problem.q_rows.capacity == 0) return;
    const ForwardParams params = make_params(problem, row.config);
    const DeviceGuard guard(problem.device.id);
    check(row.forward(params, stream), row.config.name);
}

}  // namespace libflash::cuda
