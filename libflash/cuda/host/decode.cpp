// Decode: fills the kernel parameters from the problem and the plan, and launches the kernels.
#include <algorithm>

#include "cuda/host/cache_params.h"
#include "cuda/host/launch.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/kernels.h"

namespace libflash::cuda {
namespace {

CacheParams cache_params(const DecodeProblem& problem) {
    const KvCache& cache = problem.cache;
    CacheParams params{};
    params.k = rows_params(cache.k);
    params.v = rows_params(cache.v);
    params.seqlens = problem.cache_seqlens;
    params.entries = cache.batch_idx;
    params.table = cache.block_table;
    params.table_batch = cache.block_table_stride[0];
    params.table_column = cache.block_table_stride[1];
    params.leftpad = problem.leftpad;
    params.default_seqlen = static_cast<int32_t>(problem.default_seqlen);
    params.seqlen_new = static_cast<int32_t>(problem.seqlen_new);
    params.capacity = static_cast<int32_t>(cache.capacity);
    params.pages = static_cast<int32_t>(cache.k.shape[0]);
    if (cache.paged()) params.page_size = divisor_params(cache.page_size);
    return params;
}

// `rotated`: where the append kernel writes rotated queries, or nullptr.
AppendParams append_params(const DecodeProblem& problem, void* rotated) {
    AppendParams params{};
    params.q = rows_params(problem.q);
    if (problem.k_new.present && problem.seqlen_new > 0) {
        params.k_new = rows_params(problem.k_new);
        if (problem.v_new.present) params.v_new = rows_params(problem.v_new);
    }
    if (!problem.rotary_cos.present) return params;
    const int64_t channels = padded_channels(problem);
    if (rotated)
        params.rotated_q = {rotated, problem.q_rows.packed() ? 0 : problem.seqlen_q * problem.heads_q * channels,
                            problem.heads_q * channels, channels};
    params.cos = problem.rotary_cos.data;
    params.sin = problem.rotary_sin.data;
    params.cos_row = problem.rotary_cos.stride[0];
    params.sin_row = problem.rotary_sin.stride[0];
    params.positions = static_cast<int32_t>(problem.rotary_cos.shape[0]);
    params.pairs = static_cast<int32_t>(problem.rotary_cos.shape[1]);
    params.interleaved = problem.rotary_interleaved;
    params.is_float = problem.rotary_cos.dtype == DType::f32;
    params.query_rows_advance = problem.rows_advance();
    return params;
}

void fill_in_score_options(DecodeParams& params, const DecodeProblem& problem) {
    params.softcap = static_cast<float>(problem.softcap);
    params.left = window_side(problem.mask_rule.left);
    params.right = window_side(problem.mask_rule.right);
    params.alibi_slopes = head_params(problem.alibi_slopes);
    params.sink = head_params(problem.sink);
}

RaggedParams ragged_params(const DecodeProblem& problem, const DecodePlan& plan) {
    RaggedParams params{};
    params.active = plan.ragged;
    if (!params.active) return params;
    params.queries = lengths_params(problem.q_rows);
    params.news = lengths_params(problem.new_rows);
    params.positions = problem.positions;
    const TreeMask& tree = problem.tree;
    if (tree.data)
        params.tree = {tree.data, tree.stride[0], tree.stride[1], static_cast<int32_t>(tree.words), lengths_params(tree.rows)};
    params.left = window_side(problem.window.left);
    params.right = window_side(problem.window.right);
    params.causal = problem.causal;
    if (plan.short_tiles > 0) {
        params.most_rows = static_cast<int32_t>(plan.prefill.plan.fewest_rows - 1);
        params.short_tiles = divisor_params(plan.short_tiles);
    }
    return params;
}

CacheShardParams shard_params(const DecodeProblem& problem) {
    const CacheShard& shard = problem.shard;
    const int64_t capacity = problem.cache.capacity;
    if (shard.whole()) return {1, static_cast<int32_t>(capacity), 1, 1, 0};
    const int64_t most = kUnboundedWindow - 1 - std::min<int64_t>(problem.seqlen_new, kUnboundedWindow - 1);
    return {static_cast<int32_t>(std::min<int64_t>(shard.count, INT32_MAX)),
            static_cast<int32_t>(std::min(shard.key_of(capacity), most)), shard.keys, shard.count * shard.keys,
            shard.index * shard.keys};
}

RopeParams rope_params(const DecodeProblem& problem) {
    if (!problem.cache.k_rope.present) return {};
    RopeParams params{rows_params(problem.cache.k_rope), {}, static_cast<int32_t>(problem.cache.rope_dim())};
    if (problem.k_rope_new.present && problem.seqlen_new > 0) params.news = rows_params(problem.k_rope_new);
    return params;
}

// Whether rows of all parts of the cache can be read 16 bytes at a time.
bool cache_fits_vectors(const DecodeParams& params, const DecodeProblem& problem) {
    const int64_t stored = element_bytes(problem.cache.dtype);
    return rows_fit_vectors(params.cache.k, params.k_channels, stored) &&
           rows_fit_vectors(params.cache.v, problem.head_dim_v, stored) &&
           (params.rope.channels == 0 || rows_fit_vectors(params.rope.cache, params.rope.channels, element_bytes(problem.dtype)));
}

// Without a workspace, for the kernel of the order alone, the pointers into it are nullptr.
DecodeParams make_params(const DecodeProblem& problem, const DecodePlan& plan, char* workspace) {
    const auto region = [&](const char* name) { return workspace ? workspace + plan.workspace.offset(name) : nullptr; };
    DecodeParams params{};
    params.out = rows_params(problem.out);
    params.lse = row_statistics_params(problem.lse);
    params.cache = cache_params(problem);
    params.append = append_params(problem, plan.stores_rotated_q ? region("rotated_q") : nullptr);
    params.q = params.append.rotated_q.data ? params.append.rotated_q : rows_params(problem.q);
    fill_in_sizes(params, problem);
    params.seqlen_q = static_cast<int32_t>(problem.seqlen_q);
    params.heads_k = static_cast<int32_t>(problem.heads_k);
    params.by_tiles = divisor_params(plan.query_tiles);
    params.by_heads = divisor_params(problem.heads_k);
    params.by_head_groups = divisor_params(problem.heads_k / plan.key_heads);
    params.by_splits = divisor_params(plan.splits);
    params.by_group = divisor_params(std::max<int64_t>(1, problem.group_size()));
    fill_in_score_options(params, problem);
    params.splits = static_cast<int32_t>(plan.splits);
    params.split_size = static_cast<int32_t>(std::min<int64_t>(plan.split_size, kUnboundedWindow));
    if (plan.invariant) {  // a thread block gets all keys, and takes the segments of its group
        params.segment = params.split_size;
        params.split_size = kUnboundedWindow;
        params.segment_groups = static_cast<int32_t>(plan.segment_groups);
    }
    if (plan.splits > 1) {
        params.partial_out = reinterpret_cast<float*>(region("partial_out"));
        params.partial_lse = reinterpret_cast<float*>(region("partial_lse"));
    }
    const int64_t element = element_bytes(problem.dtype);
    params.vector_q = rows_fit_vectors(params.q, problem.head_dim, element);
    params.code = code_type(problem.cache);
    params.k_scale = cache_scale_params(problem.cache.k_scale);
    params.v_scale = cache_scale_params(problem.cache.v_scale);
    params.shard = shard_params(problem);
    params.rope = rope_params(problem);
    if (plan.prefix_tiles > 0)
        params.shared = {problem.shared.groups,
                         problem.shared.lens,
                         static_cast<int32_t>(problem.shared.count),
                         reinterpret_cast<float*>(region("prefix_sums")),
                         static_cast<int32_t>(plan.prefix_tiles),
                         plan.tile_k / kDecodeSlab};
    params.k_channels = static_cast<int32_t>(problem.head_dim - problem.cache.rope_dim());
    params.vector_kv = cache_fits_vectors(params, problem);
    const int64_t of_out = problem.out.present ? element_bytes(problem.out.dtype) : element;
    params.out_is_float = of_out > element;
    params.invariant = problem.invariant_rows;
    params.values_in_keys = problem.cache.v_in_k;
    params.vector_out = rows_fit_vectors(params.out, problem.head_dim_v, of_out, 2 * of_out);
    params.stages = plan.stages;
    params.delayed_begin = plan.delayed_begin;
    params.delayed_count = plan.delayed_count;
    // With shared keys the kernel does not read the first keys of a split.
    params.fetch_early = plan.dependent_launch && plan.prefix_tiles == 0;
    params.ragged = ragged_params(problem, plan);
    params.beside_prefill = runs_beside_prefill(plan);
    params.in_pairs = plan.in_pairs;
    return params;
}

// The parameters of the prefill kernel. It reads the rotated queries and the cache rows that the append kernel has written. The
// pointers into the workspace are not set.
PrefillParams prefill_params(const DecodeProblem& problem, const DecodeParams& decode, const PrefillPlan& plan) {
    PrefillParams params{};
    fill_in_sizes(params, problem);
    params.q = decode.q;
    params.out = decode.out;
    params.lse = decode.lse;
    params.sink = decode.sink;
    params.mask = mask_params(problem.mask_rule);
    params.q_lengths = lengths_params(problem.q_rows);
    params.rare.dropout.keep_factor = 1;
    params.schedule = plan.schedule;
    params.vector_loads = params.vector_out = true;
    params.cache = decode.cache;
    params.code = decode.code;
    params.k_scale = decode.k_scale;
    params.v_scale = decode.v_scale;
    params.news = lengths_params(problem.new_rows);
    params.fewest_rows = static_cast<int32_t>(plan.fewest_rows);
    params.blocks = static_cast<int32_t>(plan.attention.blocks);
    params.in_pairs = plan.in_pairs;
    if (decode.beside_prefill) params.multiprocessors = plan.multiprocessors;
    return params;
}

// The same for a call of decode, with its workspace.
PrefillParams prefill_params(const DecodeProblem& problem, const DecodeParams& decode, const PrefillPlan& plan, char* workspace) {
    PrefillParams params = prefill_params(problem, decode, plan);
    params.sequence_order = reinterpret_cast<int32_t*>(workspace + plan.workspace.offset("sequence_order"));
    if (plan.order_is_given) params.given_order = static_cast<const int32_t*>(problem.schedule.data);
    if (plan.long_sums) params.long_sums = reinterpret_cast<float*>(workspace + plan.workspace.offset("long_sums"));
    return params;
}

}  // namespace

void decode(const Kernel& kernel, const DecodeProblem& problem, const DecodePlan& plan, void* workspace, void* stream) {
    if (problem.batch == 0 || problem.heads_k == 0) return;
    const DecodeParams params = make_params(problem, plan, static_cast<char*>(workspace));
    const DeviceGuard guard(problem.device.id);
    const auto launch = [&](const DecodePlan& launches) { check(kernel.decode(launches, params, stream), kernel.config.name); };
    if (!plan.prefill.name) return launch(plan);
    const PrefillParams prefill =
        prefill_params(problem, params, plan.prefill.plan, static_cast<char*>(workspace) + plan.workspace.offset("prefill"));
    const auto launch_prefill = [&] { check(plan.prefill.launch(plan.prefill.plan, prefill, stream), plan.prefill.name); };
    if (!params.beside_prefill) {
        launch(plan);
        launch_prefill();
        return;
    }
    // The prefill kernel is launched after the kernels that append and before the attention kernel (beside_prefill.cuh).
    DecodePlan part = plan;
    part.attention = part.combine = {};
    launch(part);
    launch_prefill();
    part.append = part.append_codes = {};
    part.attention = plan.attention, part.combine = plan.combine;
    launch(part);
}

void decode_schedule(const DecodeProblem& problem, const DecodePlan& plan, void* stream) {
    PrefillParams params = prefill_params(problem, make_params(problem, plan, nullptr), plan.prefill.plan);
    params.sequence_order = static_cast<int32_t*>(problem.schedule.data);
    params.order_alone = true;
    const DeviceGuard guard(problem.device.id);
    check(plan.prefill.launch(plan.prefill.plan, params, stream), plan.prefill.name);
}

}  // namespace libflash::cuda
