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
        params.v_new = rows_params(problem.v_new);
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

RaggedParams ragged_params(const DecodeProblem& problem) {
    RaggedParams params{};
    params.active = is_ragged(problem);
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
    return params;
}

DecodeParams make_params(const DecodeProblem& problem, const DecodePlan& plan, char* workspace) {
    const auto region = [&](const char* name) { return workspace + plan.workspace.offset(name); };
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
    if (plan.splits > 1) {
        params.partial_out = reinterpret_cast<float*>(region("partial_out"));
        params.partial_lse = reinterpret_cast<float*>(region("partial_lse"));
    }
    const int64_t element = element_bytes(problem.dtype);
    params.vector_q = rows_fit_vectors(params.q, problem.head_dim, element);
    params.code = code_type(problem.cache);
    params.k_scale = cache_scale_params(problem.cache.k_scale);
    params.v_scale = cache_scale_params(problem.cache.v_scale);
    const int64_t stored = element_bytes(problem.cache.dtype);
    params.vector_kv = rows_fit_vectors(params.cache.k, problem.head_dim, stored) &&
                       rows_fit_vectors(params.cache.v, problem.head_dim_v, stored);
    params.vector_out = rows_fit_vectors(params.out, problem.head_dim_v, element, 2 * element);
    params.stages = plan.stages;
    params.delayed_begin = plan.delayed_begin;
    params.delayed_count = plan.delayed_count;
    params.fetch_early = plan.dependent_launch;
    params.ragged = ragged_params(problem);
    return params;
}

}  // namespace

void decode(const Kernel& kernel, const DecodeProblem& problem, const DecodePlan& plan, void* workspace, void* stream) {
    if (problem.batch == 0 || problem.heads_k == 0) return;
    const DecodeParams params = make_params(problem, plan, static_cast<char*>(workspace));
    const DeviceGuard guard(problem.device.id);
    check(kernel.decode(plan, params, stream), kernel.config.name);
}

}  // namespace libflash::cuda
