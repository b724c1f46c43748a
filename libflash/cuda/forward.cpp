// Forward: from the problem to the parameters of the kernel, and its launch.
#include <cstring>

#include "cuda/attention/fill_params.h"
#include "cuda/attention/fill_schedule.h"
#include "cuda/attention/forward_kind.h"
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

// Rows of q, k and v can be read 16 bytes at a time, and head dims are whole multiples of that.
bool loads_in_vectors(const AttentionProblem& problem) {
    const int64_t element = element_bytes(problem.dtype);
    const auto fits = [&](const TensorView& tensor, int64_t dim) { return in_vectors(rows_params(tensor), dim, element); };
    return fits(problem.q, problem.head_dim) && fits(problem.k, problem.head_dim) && fits(problem.v, problem.head_dim_v);
}
bool is_general(const AttentionProblem& problem) { return has_rare_options(problem) || !loads_in_vectors(problem); }

int tile_rows(const AttentionProblem& problem, const KernelConfig& config) {
    if (!on_sm90(config)) return config.tile_q;
    return forward_tile_q(config,
                          forward_kind(config, is_general(problem), is_given_out(problem, config), problem.block_mask.present));
}

ScheduleParams schedule(const AttentionProblem& problem, const KernelConfig& config) {
    // Later rows see more keys under a causal rule: the longest first, or, where a thread block's work is settled beforehand, long with short.
    const bool causal = problem.mask_rule.right < MaskRule::kUnbounded, given_out = is_given_out(problem, config);
    const bool paired = causal && on_sm90(config) && !given_out;
    const int tile = tile_rows(problem, config);
    // As if a head filled the cache: then one head comes after the other, and those at work share its keys and values at once.
    const double head_bytes = on_sm90(config) ? kL2Bytes : key_bytes(problem);
    ScheduleParams params =
        schedule_params(problem.q_rows, problem.batch, problem.heads_q, tile * (paired ? 2 : 1), head_bytes, causal && !paired);
    params.paired = paired;
    return params;
}

ForwardParams make_params(const AttentionProblem& problem, const KernelConfig& config) {
    ForwardParams params{};
    fill_in_problem(params, problem);
    params.block_mask = block_mask_params(problem.block_mask, true);
    params.schedule = schedule(problem, config);
    params.vector_loads = loads_in_vectors(problem);
    params.vector_out = in_vectors(params.out, problem.head_dim_v, element_bytes(problem.dtype));
    params.general = is_general(problem);
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
