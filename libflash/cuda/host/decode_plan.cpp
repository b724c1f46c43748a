// The parts of a decode plan that all architectures share.
#include "cuda/host/decode_plan.h"

#include <algorithm>

#include "cuda/host/limits.h"
#include "cuda/host/problem_params.h"

namespace libflash::cuda {

bool has_codes(const DecodeProblem& problem) { return element_bytes(problem.cache.dtype) == 1; }

DecodeStorage storage_of(const DecodeProblem& problem) {
    if (has_codes(problem)) return DecodeStorage::codes;
    return has_scales(problem.cache) ? DecodeStorage::scaled : DecodeStorage::plain;
}

bool appends_codes(const DecodeProblem& problem) {
    return storage_of(problem) != DecodeStorage::plain || problem.cache.k_rope.present;
}

Workspace decode_workspace(const DecodePlan& plan, const KernelConfig& config, const DecodeProblem& problem) {
    Workspace regions;
    if (plan.stores_rotated_q) {
        const int64_t rows = problem.query_rows() * problem.heads_q;
        regions.add("rotated_q", static_cast<size_t>(rows * padded_channels(problem) * element_bytes(problem.dtype)));
    }
    if (plan.splits > 1) {
        const int64_t rows = plan.short_tiles > 0 ? problem.batch * problem.heads_k * plan.short_tiles * plan.tile_q
                                                  : problem.query_rows() * problem.heads_q;
        regions.add("partial_out", static_cast<size_t>(rows * plan.splits * config.head_dim_v) * sizeof(float));
        const int64_t numbers = plan.invariant ? 2 : 1;  // invariant: the kept maximum and the row sum; else the LSE
        regions.add("partial_lse", static_cast<size_t>(rows * plan.splits * numbers) * sizeof(float));
    }
    if (plan.prefill.name) regions.add("prefill", plan.prefill.plan.workspace.bytes());
    return regions;
}

void plan_append(DecodePlan& plan, const Kernel& kernel, const DecodeProblem& problem) {
    const bool appends = problem.k_new.present && problem.seqlen_new > 0, rotates = problem.rotary_cos.present;
    if (plan.fused_append || (!appends && !rotates)) return;
    int64_t new_rows = appends ? problem.appended_rows() * problem.heads_k : 0;
    if (new_rows > 0 && appends_codes(problem)) {
        const int64_t parts = kAppendedParts + problem.cache.k_rope.present;
        plan.appended_codes = static_cast<uint32_t>(new_rows);
        plan.append_codes = launch_shape(ceil_div(parts * new_rows, kAppendThreads / 32),  // a warp for each part
                                         kernel.resources(static_cast<int>(DecodeStep::append_codes), plan.instance.number));
        new_rows = 0;
        if (!rotates) return;
    }
    const int64_t rows = new_rows + (rotates ? problem.query_rows() * problem.heads_q : 0);
    int64_t slots = 1;  // threads per row, two channels each; a power of two
    while (2 * slots < problem.head_dim || 2 * slots < problem.head_dim_v) slots *= 2;
    plan.append_rows = static_cast<uint32_t>(new_rows);
    plan.append_threads_per_row = static_cast<uint32_t>(slots);
    const KernelResources resources = kernel.resources(static_cast<int>(DecodeStep::append), plan.instance.number);
    plan.append = launch_shape(ceil_div(rows, append_threads(kernel.config.head_dim) / slots), resources);
}

void plan_attention(DecodePlan& plan, const Kernel& kernel, const DecodeSizes& sizes) {
    const DecodeProblem& problem = sizes.problem;
    if (problem.seqlen_q == 0 || problem.heads_q == 0) return;
    const auto resources = [&](DecodeStep step) { return kernel.resources(static_cast<int>(step), plan.instance.number); };
    const int64_t blocks = sizes.launched_blocks() / plan.key_heads * (plan.invariant ? plan.segment_groups : plan.splits);
    plan.attention = launch_shape(blocks, resources(DecodeStep::attention));
    const int64_t rows = plan.short_tiles > 0 ? problem.batch : problem.query_rows();  // with long chunks: one per sequence
    if (plan.splits > 1) plan.combine = launch_shape(rows * problem.heads_q, resources(DecodeStep::combine));
}

}  // namespace libflash::cuda
