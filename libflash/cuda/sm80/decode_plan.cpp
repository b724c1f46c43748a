// The plan of decode for sm_80 and later: splits, where rows are appended and rotated, launches, workspace. Tiles and splits
// do not depend on whether the cache holds codes of 8 bits or their values with the same scales, so that results have the same
// bits, unless long chunks over the latter have a kernel of their own (DecodePrefill): it takes neither codes nor scales, and
// changes the splits of the other sequences.
#include <algorithm>

#include "cuda/host/limits.h"
#include "cuda/host/problem_params.h"
#include "cuda/kernels.h"
#include "cuda/sm80/decode_instance.h"
#include "cuda/sm80/decode_prefix_plan.h"
#include "cuda/sm80/decode_splits.h"
#include "cuda/sm80/plan.h"

namespace libflash::cuda::sm80 {

namespace {

bool has_codes(const DecodeProblem& problem) { return element_bytes(problem.cache.dtype) == 1; }

DecodeStorage storage_of(const DecodeProblem& problem) {
    if (has_codes(problem)) return DecodeStorage::codes;
    return has_scales(problem.cache) ? DecodeStorage::scaled : DecodeStorage::plain;
}

// Whether new rows are more than elements of the type of the queries (append_codes.cuh).
bool appends_codes(const DecodeProblem& problem) {
    return storage_of(problem) != DecodeStorage::plain || problem.cache.k_rope.present;
}

// True if the attention kernel appends and rotates: one query row and at most one new row per sequence. The new key is visible,
// so exactly one split contains it.
bool appends_inside(const KernelConfig& config, const DecodeProblem& problem) {
    const bool scaled = storage_of(problem) == DecodeStorage::scaled;
    return decode_can_append(config.head_dim, config.tile_k) && !scaled && !problem.cache.k_rope.present && !is_ragged(problem) &&
           (problem.k_new.present || problem.rotary_cos.present) && problem.k_new.present == problem.v_new.present &&
           problem.seqlen_q == 1 && problem.seqlen_new <= 1 && problem.heads_q > 0 &&
           !decode_shares_keys(problem.seqlen_q * problem.group_size()) && !problem.leftpad;
}

Workspace workspace_of(const DecodePlan& plan, const KernelConfig& config, const DecodeProblem& problem) {
    Workspace regions;
    if (plan.stores_rotated_q) {
        const int64_t rows = problem.query_rows() * problem.heads_q;
        regions.add("rotated_q", static_cast<size_t>(rows * padded_channels(problem) * element_bytes(problem.dtype)));
    }
    if (plan.prefix_tiles > 0) {
        const int64_t sums = plan.splits * (plan.tile_k / kDecodeSlab);
        regions.add("prefix_sums", static_cast<size_t>(bytes_of_prefix_sums(config, problem) * sums));
    }
    if (plan.splits > 1) {
        const int64_t rows = plan.short_tiles > 0 ? problem.batch * problem.heads_k * plan.short_tiles * plan.tile_q
                                                  : problem.query_rows() * problem.heads_q;
        regions.add("partial_out", static_cast<size_t>(rows * plan.splits * config.head_dim_v) * sizeof(float));
        const int64_t numbers = plan.invariant ? 2 : 1;  // a segment has a kept maximum and a row sum
        regions.add("partial_lse", static_cast<size_t>(rows * plan.splits * numbers) * sizeof(float));
    }
    if (plan.prefill.name) regions.add("prefill", plan.prefill.plan.workspace.bytes());
    return regions;
}

// The kernel that appends and rotates new rows and rotates the queries, if it is needed.
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
    plan.append_slots = static_cast<uint32_t>(slots);
    const KernelResources resources = kernel.resources(static_cast<int>(DecodeStep::append), plan.instance.number);
    plan.append = launch_shape(ceil_div(rows, append_threads(kernel.config.head_dim) / slots), resources);
}

// For several waves of thread blocks. Thread blocks that begin together end together, and memory is idle until the next ones
// have begun: so all but one thread block per multiprocessor of the first wave begin later. If the thread blocks of a
// multiprocessor have enough bytes in flight with one stage fewer, they use one fewer, which is faster.
void pace_waves(DecodePlan& plan, const DecodeSizes& sizes) {
    constexpr int kEnoughBytes = 128 << 10;  // in flight per multiprocessor
    const KernelConfig& config = sizes.config;
    const int64_t of_each = sizes.blocks_per_multiprocessor(), multiprocessors = sizes.device.multiprocessors,
                  blocks = sizes.unsplit_blocks() * plan.splits / plan.key_heads;
    if (sizes.ragged() || plan.prefix_tiles > 0 || plan.prefill.name || blocks <= of_each * multiprocessors || of_each < 2)
        return;
    plan.delayed_begin = static_cast<uint32_t>(multiprocessors);
    plan.delayed_count = static_cast<uint32_t>((of_each - 1) * multiprocessors);
    const int64_t tile_bytes = 2 * config.tile_k * config.head_dim * element_bytes(sizes.problem.dtype);
    if (!has_codes(sizes.problem) && !sizes.shares_keys() && (config.stages - 1) * tile_bytes * of_each >= kEnoughBytes)
        plan.stages = config.stages - 1;
}

void plan_attention(DecodePlan& plan, const Kernel& kernel, const DecodeSizes& sizes) {
    const DecodeProblem& problem = sizes.problem;
    if (problem.seqlen_q == 0 || problem.heads_q == 0) return;
    const auto resources = [&](DecodeStep step) { return kernel.resources(static_cast<int>(step), plan.instance.number); };
    const int64_t blocks = sizes.launched_blocks() / plan.key_heads * plan.splits;
    const int64_t classes = plan.tile_k / kDecodeSlab, of_prefixes = plan.prefix_tiles * problem.heads_k * plan.splits * classes;
    if (plan.prefix_tiles > 0) plan.prefix = launch_shape(of_prefixes, resources(DecodeStep::prefix));
    plan.attention = launch_shape(blocks, resources(DecodeStep::attention));
    const int64_t rows = plan.short_tiles > 0 ? problem.batch : problem.query_rows();  // beside long chunks: sequences
    if (plan.splits > 1) plan.combine = launch_shape(rows * problem.heads_q, resources(DecodeStep::combine));
}

}  // namespace

DecodePlan plan_decode(const Kernel& kernel, const DecodeProblem& problem, const DeviceProperties& device,
                       const DecodePrefill& prefill) {
    check_sizes(problem);
    const KernelConfig& config = kernel.config;
    const DecodeSizes sizes(config, problem, device, prefill.plan.fewest_rows);
    const bool all_long = prefill.name && !problem.q_rows.packed();  // every sequence has the same number of rows
    const DecodeSplits splits = all_long ? DecodeSplits{1, 1} : choose_splits(sizes);
    const DecodeStorage storage = storage_of(problem);
    DecodePlan plan;
    plan.prefill = prefill;
    plan.short_tiles = sizes.short_tiles();
    plan.splits = splits.splits;
    plan.split_size = splits.split_size;
    plan.invariant = sizes.has_segments();
    plan.key_heads = splits.key_heads;
    const bool prefixes = !plan.invariant && uses_prefixes(sizes, splits);  // invariant rows have sums of their own
    if (prefixes) plan.prefix_tiles = most_prefix_tiles(problem);
    plan.fused_append = !prefixes && appends_inside(config, problem);
    plan.stores_rotated_q = problem.rotary_cos.present && !plan.fused_append;
    const bool codes = storage == DecodeStorage::codes,
               general = is_wide_decode(config.head_dim) || (has_rare_options(problem) && !prefixes);
    plan.ragged = sizes.ragged() && !prefixes;
    const DecodeKind kind = prefixes         ? kind_after_prefix(plan.key_heads)
                            : plan.invariant ? DecodeKind::invariant
                            : plan.ragged    ? ragged_decode_kind(codes, general)
                                             : decode_kind(sizes.shares_keys(), plan.key_heads, plan.fused_append, storage);
    plan.instance = {static_cast<int>(kind), decode_kind_name(kind)};
    plan.tile_q = static_cast<int>(sizes.tile_q());
    plan.tile_k = config.tile_k / plan.key_heads;
    plan.query_tiles = prefixes ? 1 : std::max<int64_t>(1, sizes.query_tiles());
    plan.stages = general && !plan.invariant ? kGeneralDecodeStages
                  : prefixes                 ? decode_stages_after_prefix(config.stages)
                  : codes                    ? decode_code_stages(config.head_dim, config.stages, sizes.shares_keys())
                                             : config.stages;
    plan.dependent_launch = device.arch >= 90;
    plan.workspace = workspace_of(plan, config, problem);
    if (problem.batch == 0 || problem.heads_k == 0) return plan;
    pace_waves(plan, sizes);
    plan_append(plan, kernel, problem);
    if (!all_long) plan_attention(plan, kernel, sizes);
    return plan;
}

}  // namespace libflash::cuda::sm80
