// The plan of decode for sm_80 and later: splits, which kernel appends and rotates, launches, workspace. Tiles and splits are the
// same whether the cache holds codes of 8 bits or the values of the codes, with the same scales or without scales, so that
// results have the same bits. There are two exceptions for values without scales: long chunks may have a separate kernel
// (DecodePrefill), which changes the splits of the other sequences, and many rows may have another kernel (sm90/decode_plan.cpp).
#include <algorithm>

#include "cuda/attention/invariant_segments.h"
#include "cuda/host/decode_plan.h"
#include "cuda/host/limits.h"
#include "cuda/host/problem_params.h"
#include "cuda/kernels.h"
#include "cuda/sm80/decode_instance.h"
#include "cuda/sm80/decode_prefix_plan.h"
#include "cuda/sm80/plan.h"

namespace libflash::cuda::sm80 {

namespace {

// True if the attention kernel appends and rotates: one query row and at most one new row per sequence. The new key is visible,
// so exactly one split contains it.
bool appends_inside(const KernelConfig& config, const DecodeProblem& problem) {
    const bool scaled = storage_of(problem) == DecodeStorage::scaled;
    return decode_can_append(config.head_dim, config.tile_k) && !scaled && !problem.cache.k_rope.present && !is_ragged(problem) &&
           (problem.k_new.present || problem.rotary_cos.present) && problem.k_new.present == problem.v_new.present &&
           problem.seqlen_q == 1 && problem.seqlen_new <= 1 && problem.heads_q > 0 &&
           !decode_shares_keys(problem.seqlen_q * problem.group_size()) && !problem.leftpad;
}

// Delays some thread blocks if there are several waves. Thread blocks that begin together end together, and memory is idle until
// the next thread blocks have begun. So in the first wave all thread blocks of a multiprocessor but one begin later. If the
// thread blocks of a multiprocessor have enough bytes in flight with one stage fewer, they use one stage fewer, which is faster.
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

// Plans the launch of the kernel for keys that sequences share (decode_prefix.cuh).
void plan_prefix(DecodePlan& plan, const Kernel& kernel, const DecodeProblem& problem) {
    if (plan.prefix_tiles == 0 || problem.seqlen_q == 0 || problem.heads_q == 0) return;
    plan_prefix_launch(plan, problem, kPrefixRows, kernel.resources(static_cast<int>(DecodeStep::prefix), plan.instance.number));
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
    if (plan.invariant) {
        plan.first_segment = splits.split_size > 0 ? static_cast<int>(splits.split_size) : kFirstSegment;
        plan.segment_growth_begin = splits.split_size > 0 ? 0 : kSegmentGrowth;
        plan.invariant_version = kInvariantVersion;
        plan.segment_groups = splits.groups;
    }
    plan.key_heads = splits.key_heads;
    const bool prefixes =
        !plan.invariant && uses_prefixes(sizes, splits);  // the instance for invariant rows cannot continue sums
    if (prefixes) plan.prefix_tiles = most_prefix_tiles(problem, kPrefixRows);
    const bool codes = storage == DecodeStorage::codes;
    plan.fused_append =
        !prefixes && appends_inside(config, problem) && (!codes || can_append_codes(plan.key_heads, sizes.group_rows()));
    plan.stores_rotated_q = problem.rotary_cos.present && !plan.fused_append;
    const bool general = is_wide_decode(config.head_dim) || (has_rare_options(problem) && !prefixes);
    plan.ragged = sizes.ragged() && !prefixes;
    const DecodeKind kind = prefixes         ? kind_after_prefix(plan.key_heads)
                            : plan.invariant ? DecodeKind::invariant
                            : plan.ragged    ? ragged_decode_kind(storage, general, is_wide_decode(config.head_dim))
                                             : decode_kind(sizes.shares_keys(), plan.key_heads, plan.fused_append, storage,
                                                           are_few_rows(sizes.group_rows()));
    plan.instance = {static_cast<int>(kind), decode_kind_name(kind)};
    plan.tile_q = static_cast<int>(sizes.tile_q());
    plan.tile_k = config.tile_k / plan.key_heads;
    plan.query_tiles = prefixes ? 1 : std::max<int64_t>(1, sizes.query_tiles());
    plan.stages = general && !plan.invariant ? general_decode_stages(config.stages)
                  : prefixes                 ? decode_stages_after_prefix(config.stages)
                  : codes                    ? decode_code_stages(config.head_dim, config.stages, sizes.shares_keys())
                                             : config.stages;
    plan.dependent_launch = device.arch >= 90;
    plan.workspace = decode_workspace(plan, config, problem);
    if (prefixes) {
        const int64_t sums = plan.splits * (plan.tile_k / kDecodeSlab);
        plan.workspace.add("prefix_sums", static_cast<size_t>(bytes_of_prefix_sums(config, problem) * sums));
    }
    if (problem.batch == 0 || problem.heads_k == 0) return plan;
    pace_waves(plan, sizes);
    plan_append(plan, kernel, problem);
    plan_prefix(plan, kernel, problem);
    if (!all_long) plan_attention(plan, kernel, sizes);
    return plan;
}

}  // namespace libflash::cuda::sm80
