#include "problem/attention_parts.h"
#include "problem/lengths.h"
#include "problem/options.h"
#include "problem/score.h"

namespace libflash {

// Size of the struct in its first version; later versions append fields.
constexpr size_t kVersion1 = offsetof(flash_attention_options_t, rng_state);
static_assert(kVersion1 == 224, "version 1 of the attention options");

namespace {

void check_no_seed(const flash_attention_options_t& options) {
    if (options.seed != 0) invalid("seed", "must be 0 with rng_state", options.seed);
    if (options.offset != 0) invalid("offset", "must be 0 with rng_state", options.offset);
}

}  // namespace

flash_attention_options_t read_attention_options(AttentionProblem& problem, const flash_attention_options_t* given,
                                                 uint32_t own_flags) {
    const flash_attention_options_t options = read_options(given, kVersion1);
    check_flags(options.flags, kAttentionFlags | own_flags);
    check_reserved(options.reserved);
    if (options.reserved2 != 0) invalid("reserved2", "must be 0", options.reserved2);
    read_score_options(problem, options);
    problem.dropout = {read_dropout(options.dropout_p), options.seed, options.offset};
    if (options.rng_state) check_no_seed(options);
    problem.mask_rule = read_mask_rule(options.flags, options.window_left, options.window_right);
    check_max_seqlen(options.max_seqlen_q, "max_seqlen_q");
    check_max_seqlen(options.max_seqlen_k, "max_seqlen_k");
    Request& request = problem.request;
    request.num_splits = read_num_splits(options.num_splits);
    read_request(request, options);
    request.tile_q = read_tile(options.tile_q, "tile_q");
    request.tile_k = read_tile(options.tile_k, "tile_k");
    request.deterministic = (options.flags & FLASH_FLAG_DETERMINISTIC) != 0;
    read_shard_options(problem, options);
    return options;
}

OptionTensors read_option_tensors(Reader& reader, const flash_attention_options_t& options, const AttentionProblem& problem) {
    OptionTensors tensors;
    tensors.cu_q = reader.optional(options.cu_seqlens_q, "cu_seqlens_q");
    tensors.cu_k = reader.optional(options.cu_seqlens_k, "cu_seqlens_k");
    tensors.used_q = reader.optional(options.seqused_q, "seqused_q");
    tensors.used_k = reader.optional(options.seqused_k, "seqused_k");
    tensors.slopes = reader.optional(options.alibi_slopes, "alibi_slopes");
    tensors.bias = reader.optional(options.bias, "bias");
    tensors.mask = reader.optional(options.mask, "mask");
    tensors.sink = reader.optional(options.learnable_sink, "learnable_sink");
    tensors.block_mask = reader.optional(options.block_mask, "block_mask");
    if (options.block_lists) {
        if (options.block_mask) invalid("block_lists", "cannot be given together with block_mask", "both are");
        tensors.lists = read_block_lists(reader, *options.block_lists, kRead);
    }
    if (!problem.backward) {
        if (options.dlse) invalid("dlse", "is for backward, not for a forward call", "given");
        if (options.dbias) invalid("dbias", "is for backward, not for a forward call", "given");
        if (options.dsink) invalid("dsink", "is for backward, not for a forward call", "given");
        if (options.delta) invalid("delta", "is for backward, not for a forward call", "given");
        tensors.max_logit = reader.optional(options.max_logit, "max_logit", kWritten);
        tensors.entropy = reader.optional(options.entropy, "entropy", kWritten);
    } else {
        if (options.max_logit) invalid("max_logit", "is for forward, not for a backward call", "given");
        if (options.entropy) invalid("entropy", "is for forward, not for a backward call", "given");
        tensors.delta = reader.optional(options.delta, "delta", problem.reads_delta ? kRead : kWritten);
        tensors.dlse = reader.optional(options.dlse, "dlse");
        tensors.dbias = reader.optional(options.dbias, "dbias", kWritten);
        tensors.dsink = reader.optional(options.dsink, "dsink", kWritten);
    }
    tensors.rng_state = reader.optional(options.rng_state, "rng_state");
    tensors.shard = read_shard_tensors(reader, options);
    return tensors;
}

namespace {

// The batch size from cu_seqlens. cu_seqlens is checked before the packed tensor, because it decides how many dimensions that
// tensor must have.
int64_t batch_of(const TensorView& cu, const char* argument) {
    check_ndim(cu, argument, 1, "(batch + 1,)");
    if (cu.shape[0] < 1) invalid(argument, "must have batch + 1 entries, so at least one", "it has none");
    return cu.shape[0] - 1;
}

void check_heads(const AttentionProblem& problem) {
    if (problem.heads_k == 0 ? problem.heads_q != 0 : problem.heads_q % problem.heads_k != 0) {
        invalid("k", "the heads of q must be a multiple of those of k", "q has ", problem.heads_q, ", k has ", problem.heads_k);
    }
    if (problem.head_dim == 0) invalid("q", "head_dim must be at least 1", 0);
    if (problem.head_dim_v == 0) invalid("v", "head_dim_v must be at least 1", 0);
}

}  // namespace

void build_attention_sizes(AttentionProblem& p, const OptionTensors& tensors, const flash_attention_options_t& options) {
    const bool packed_q = tensors.cu_q.present, packed_k = tensors.cu_k.present;
    p.device = p.q.device;
    p.dtype = p.q.dtype;
    check_float(p.q, "q");
    check_device(p.k, "k", p.device);
    check_device(p.v, "v", p.device);
    check_dtype(p.k, "k", p.dtype);
    check_dtype(p.v, "v", p.dtype);
    check_ndim(p.q, "q", packed_q ? 3 : 4,
               packed_q ? "(total_q, heads_q, head_dim) with cu_seqlens_q"
                        : "(batch, seqlen_q, heads_q, head_dim) without cu_seqlens_q");
    check_ndim(p.k, "k", packed_k ? 3 : 4,
               packed_k ? "(total_k, heads_k, head_dim) with cu_seqlens_k"
                        : "(batch, seqlen_k, heads_k, head_dim) without cu_seqlens_k");
    check_ndim(p.v, "v", packed_k ? 3 : 4,
               packed_k ? "(total_k, heads_k, head_dim_v) with cu_seqlens_k"
                        : "(batch, seqlen_k, heads_k, head_dim_v) without cu_seqlens_k");

    p.batch = packed_q ? batch_of(tensors.cu_q, "cu_seqlens_q") : p.q.shape[0];
    p.heads_q = p.q.shape[p.q.ndim - 2];
    p.head_dim = p.q.shape[p.q.ndim - 1];
    p.heads_k = p.k.shape[p.k.ndim - 2];
    p.head_dim_v = p.v.shape[p.v.ndim - 1];
    const int64_t rows = p.k.shape[packed_k ? 0 : 1];
    if (packed_k) {
        check_shape(p.k, "k", {rows, p.heads_k, p.head_dim}, "(total_k, heads_k, head_dim)");
        check_shape(p.v, "v", {rows, p.heads_k, p.head_dim_v}, "(total_k, heads_k, head_dim_v)");
    } else {
        check_shape(p.k, "k", {p.batch, rows, p.heads_k, p.head_dim}, "(batch, seqlen_k, heads_k, head_dim)");
        check_shape(p.v, "v", {p.batch, rows, p.heads_k, p.head_dim_v}, "(batch, seqlen_k, heads_k, head_dim_v)");
    }
    check_heads(p);
    p.softmax_scale = score_scale(p, options.flags, p.head_dim);
}

void check_same(const TensorView& view, const Argument& argument, const TensorView& model, const char* names) {
    check_device(view, argument, model.device);
    check_dtype(view, argument, model.dtype);
    const int64_t* s = model.shape;
    if (model.ndim == 4) check_shape(view, argument, {s[0], s[1], s[2], s[3]}, names);
    if (model.ndim == 3) check_shape(view, argument, {s[0], s[1], s[2]}, names);
}

void check_gradient(const AttentionProblem& p, const TensorView& view, const Argument& argument, const TensorView& model,
                    const char* names) {
    check_device(view, argument, model.device);
    check_partial_dtype(view, argument, model.dtype);
    if (p.adds && element_bytes(view.dtype) < 4) invalid(argument, "must be float32 with FLASH_FLAG_ADD", "it is ", view.dtype);
    const int64_t* s = model.shape;
    if (model.ndim == 4) check_shape(view, argument, {s[0], s[1], s[2], s[3]}, names);
    if (model.ndim == 3) check_shape(view, argument, {s[0], s[1], s[2]}, names);
}

void check_like_out(const AttentionProblem& p, const TensorView& view, const Argument& argument, bool partial) {
    check_device(view, argument, p.device);
    if (partial) {
        check_partial_dtype(view, argument, p.dtype);
    } else {
        check_dtype(view, argument, p.dtype);
    }
    if (p.q.ndim == 3) {
        check_shape(view, argument, {p.q.shape[0], p.heads_q, p.head_dim_v}, "(total_q, heads_q, head_dim_v)");
    } else {
        check_shape(view, argument, {p.batch, p.q.shape[1], p.heads_q, p.head_dim_v}, "(batch, seqlen_q, heads_q, head_dim_v)");
    }
}

void check_like_lse(const AttentionProblem& p, const TensorView& view, const Argument& argument) {
    check_device(view, argument, p.device);
    check_dtype(view, argument, p.dtype == DType::f64 ? DType::f64 : DType::f32);
    if (p.q.ndim == 3) {
        check_shape(view, argument, {p.heads_q, p.q.shape[0]}, "(heads_q, total_q)");
    } else {
        check_shape(view, argument, {p.batch, p.heads_q, p.q.shape[1]}, "(batch, heads_q, seqlen_q)");
    }
}

namespace {

void build_backward_options(AttentionProblem& p, const OptionTensors& tensors, const ScoreSizes& sizes) {
    p.dlse = tensors.dlse;
    if (p.dlse.present) check_like_lse(p, p.dlse, "dlse");
    p.delta = tensors.delta;
    if (p.delta.present) {
        check_like_lse(p, p.delta, "delta");
        if (p.reads_delta && p.dlse.present) {
            invalid("dlse", "is part of delta, so it must not be given with a delta that is read", "given");
        }
    }
    if (tensors.dbias.present) {
        if (!p.bias.present) invalid("dbias", "needs bias", "there is no bias");
        check_device(tensors.dbias, "dbias", p.device);
        check_dtype(tensors.dbias, "dbias", p.bias.dtype);
        p.dbias = build_score_tensor(tensors.dbias, "dbias", sizes, p.device);
        for (int i = 0; i < 4; ++i) {
            if (p.dbias.shape[i] != p.bias.shape[i]) {
                invalid("dbias", "shape must be that of bias", "it is ", Sizes{tensors.dbias.shape, tensors.dbias.ndim},
                        ", bias ", Sizes{tensors.bias.shape, tensors.bias.ndim});
            }
        }
    }
    if (tensors.dsink.present) {
        if (!p.sink.present) invalid("dsink", "needs learnable_sink", "there is no learnable_sink");
        check_dtype(tensors.dsink, "dsink", p.sink.dtype);
        p.dsink = build_head_vector(tensors.dsink, "dsink", p.heads_q, p.dtype, p.device);
    }
}

void check_head_statistic(const AttentionProblem& p, const TensorView& view, const Argument& argument) {
    check_device(view, argument, p.device);
    check_dtype(view, argument, p.dtype == DType::f64 ? DType::f64 : DType::f32);
    check_shape(view, argument, {p.heads_q}, "that of lse, or (heads_q,)");
}

void build_statistics(AttentionProblem& p, const OptionTensors& tensors) {
    p.max_logit = tensors.max_logit;
    p.entropy = tensors.entropy;
    if (p.continues && p.max_logit.present) invalid("max_logit", "is not known with FLASH_FLAG_CONTINUE", "given");
    if (p.continues && p.entropy.present) invalid("entropy", "is not known with FLASH_FLAG_CONTINUE", "given");
    if (p.max_logit.present && p.max_logit.ndim == 1) check_head_statistic(p, p.max_logit, "max_logit");
    if (p.max_logit.present && p.max_logit.ndim != 1) check_like_lse(p, p.max_logit, "max_logit");
    if (p.entropy.present) check_like_lse(p, p.entropy, "entropy");
}

void build_rng_state(AttentionProblem& p, const TensorView& state) {
    check_device(state, "rng_state", p.device);
    check_dtype(state, "rng_state", DType::i64);
    check_shape(state, "rng_state", {2}, "(seed, offset)");
    check_contiguous(state, "rng_state");
    if (p.device.is_cuda()) p.dropout.state = static_cast<const uint64_t*>(state.data);
}

}  // namespace

void build_option_tensors(AttentionProblem& p, const OptionTensors& tensors, const flash_attention_options_t& options) {
    p.q_rows = build_sequences(kQuerySide, p.q, p.batch, tensors.cu_q, tensors.used_q, options.max_seqlen_q);
    p.k_rows = build_sequences(kKeySide, p.k, p.batch, tensors.cu_k, tensors.used_k, options.max_seqlen_k);
    if (tensors.slopes.present) p.alibi_slopes = build_slopes(tensors.slopes, p.batch, p.heads_q, p.dtype, p.device);

    // A packed side has no single length. Its bias, masks and block masks must cover the caller's bound max_seqlen, 0 if not
    // given. Step 4 of build.h compares them with the real lengths.
    const bool packed_q = p.q_rows.packed(), packed_k = p.k_rows.packed();
    const int64_t rows = packed_q ? options.max_seqlen_q : p.q_rows.capacity;
    const int64_t cols = packed_k ? options.max_seqlen_k : p.k_rows.capacity;
    const ScoreSizes sizes = {p.batch, p.heads_q, rows, cols, packed_q, packed_k};
    if (tensors.bias.present) {
        check_float32_or(tensors.bias, "bias", p.dtype);
        p.bias = build_score_tensor(tensors.bias, "bias", sizes, p.device);
    }
    if (tensors.mask.present) {
        check_dtype(tensors.mask, "mask", DType::boolean);
        p.mask = build_score_tensor(tensors.mask, "mask", sizes, p.device);
    }
    if (tensors.sink.present) p.sink = build_head_vector(tensors.sink, "learnable_sink", p.heads_q, p.dtype, p.device);
    const BlockSizes blocks = {p.batch, p.heads_q, blocks_of(rows), blocks_of(cols), packed_q, packed_k};
    if (tensors.block_mask.present) p.block_mask = build_block_mask(tensors.block_mask, blocks, p.device);
    if (options.block_lists) p.block_mask = build_block_lists(tensors.lists, blocks, p.device, p.backward);
    if (p.backward) build_backward_options(p, tensors, sizes);
    build_statistics(p, tensors);
    if (tensors.rng_state.present) build_rng_state(p, tensors.rng_state);
    build_shard_tensors(p, tensors.shard);
}

namespace {

void check_lengths_and_lists(const AttentionProblem& p, const OptionTensors& tensors, const flash_attention_options_t& options) {
    const int64_t rows = check_lengths(kQuerySide, p.q_rows, options.max_seqlen_q);
    const int64_t cols = check_lengths(kKeySide, p.k_rows, options.max_seqlen_k);
    const int64_t covered_rows = p.q_rows.packed() ? rows : 0, covered_cols = p.k_rows.packed() ? cols : 0;
    if (p.q_rows.packed() || p.k_rows.packed()) {
        check_score_covers(p.bias, "bias", covered_rows, covered_cols);
        check_score_covers(p.mask, "mask", covered_rows, covered_cols);
        check_blocks_cover(p.block_mask, p.block_mask.has_lists ? "block_lists" : "block_mask", covered_rows, covered_cols);
    }
    if (p.block_mask.has_lists) check_block_lists(tensors.lists);
    check_shard_contents(p);
}

void read_rng_state(AttentionProblem& p, const TensorView& state) {
    if (!state.present) return;
    const auto* numbers = static_cast<const uint64_t*>(state.data);
    p.dropout.seed = numbers[0];
    p.dropout.offset = numbers[1];
}

}  // namespace

void check_contents(AttentionProblem& p, const OptionTensors& tensors, const flash_attention_options_t& options,
                    const Reader& reader) {
    if (reader.may_read_data(p.device)) {
        check_lengths_and_lists(p, tensors, options);
        read_rng_state(p, tensors.rng_state);
    }
    reader.check_overlap();
}

}  // namespace libflash
