// The forward_tangent plan of sm_90a: persistent thread blocks, one per multiprocessor, with a static schedule. Where only the
// device knows the lengths, the times of work tiles are unknown, so there is one thread block per work tile.
#include <algorithm>

#include "cuda/host/limits.h"
#include "cuda/host/static_schedule.h"
#include "cuda/host/tangent_params.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"
#include "cuda/sm90/forward_tangent_instance.h"
#include "cuda/sm90/plan.h"

namespace libflash::cuda::sm90 {

ForwardTangentPlan plan_forward_tangent(const Kernel& kernel, const TangentProblem& problem, const DeviceProperties& device) {
    check_sizes(problem);
    const KernelConfig& config = kernel.config;
    ForwardTangentPlan plan;
    const auto fits = [&](const TensorView& tensor) { return optional_fits_vectors(problem, tensor, problem.head_dim_v); };
    plan.vector_loads = tangents_load_in_vectors(problem);
    plan.vector_rows = fits(problem.out) && fits(problem.dout) && fits(problem.tangents.dout);
    plan.vector_out = fits(problem.tangents.out);
    plan.instance = problem.from_lse || !is_fused_with_forward(config) ? kPlainTangentInstance : kFusedTangentInstance;
    plan.tile_q = config.tile_q;
    plan.tile_k = config.tile_k;
    // Under a causal mask later rows see more keys: a static schedule pairs long work tiles with short ones.
    const bool causal = problem.mask_rule.right < MaskRule::kUnbounded, dynamic = has_lengths_on_device(problem),
               paired = causal && !dynamic;
    // With kL2Bytes as the size of a head, each head group has one head: the thread blocks then share its keys and values in L2.
    plan.schedule = schedule_params(problem.q_rows, problem.batch, problem.heads_q, plan.tile_q * (paired ? 2 : 1), kL2Bytes,
                                    causal && !paired);
    plan.schedule.paired = paired;
    if (problem.batch == 0 || problem.heads_q == 0 || problem.q_rows.capacity == 0) return plan;
    const int64_t units = blocks_of(plan.schedule), most = dynamic ? units : device.multiprocessors;
    check_block_count("q", units);
    const QueryTileTimes times = query_tile_times(problem, plan.tile_q, plan.tile_k);
    plan.attention =
        launch_shape(set_static_schedule(plan.schedule, problem, times, most).blocks, kernel.resources(0, plan.instance.number));
    return plan;
}

}  // namespace libflash::cuda::sm90
