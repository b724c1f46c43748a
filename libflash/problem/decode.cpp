#include "problem/decode.h"

#include "problem/build.h"
#include "problem/cache.h"
#include "problem/cache_parts.h"
#include "problem/lengths.h"
#include "problem/options.h"
#include "problem/positions.h"
#include "problem/schedule.h"
#include "problem/score.h"
#include "problem/shared_keys.h"

namespace libflash {

namespace {

// Size of the struct in its first version; later versions append fields.
constexpr size_t kVersion1 = offsetof(flash_decode_options_t, k_scale);
static_assert(kVersion1 == 160, "version 1 of the decode options");
constexpr uint32_t kDecodeFlags =
    FLASH_FLAG_CAUSAL | FLASH_FLAG_WINDOW | FLASH_FLAG_SCALE | FLASH_FLAG_ROTARY_INTERLEAVED | FLASH_FLAG_INVARIANT_ROWS;

// The names of the arguments that describe the rows to append.
Side new_side(bool own_lengths) { return {"k_new", own_lengths ? "cu_seqlens_new" : "cu_seqlens_q", "", ""}; }

constexpr Side kTreeSide = {"tree_mask", "cu_seqlens_tree", "", ""};

struct DecodeTensors {
    TensorView cache_seqlens, block_table, batch_idx, leftpad, slopes, sink, k_scale, v_scale;
    TensorView cu_q, cu_new, positions, tree, cu_tree, shared_groups, shared_lens;
    // Whether the rows to append are packed: by cu_seqlens_new, or else by cu_seqlens_q.
    bool packs_new() const { return cu_q.present || cu_new.present; }
};

CacheShard read_cache_shard(const flash_decode_options_t& options) {
    CacheShard shard;
    if (options.shard_count < 0) invalid("shard_count", "must be at least 1 (0 counts as 1)", options.shard_count);
    if (options.shard_keys < 0) invalid("shard_keys", "must be at least 1 (0 counts as 1)", options.shard_keys);
    shard.count = options.shard_count == 0 ? 1 : options.shard_count;
    shard.keys = options.shard_keys == 0 ? 1 : options.shard_keys;
    if (options.shard_index < 0 || options.shard_index >= shard.count)
        invalid("shard_index", "must be at least 0 and below shard_count", options.shard_index, " of ", shard.count);
    int64_t round = 0;
    if (__builtin_mul_overflow(shard.count, shard.keys, &round) || round >= kPositionLimit)
        invalid("shard_keys", "times shard_count must be below 2^40", shard.keys, " x ", shard.count);
    shard.index = options.shard_index;
    return shard;
}

flash_decode_options_t read_decode_options(DecodeProblem& p, const flash_decode_options_t* given) {
    const flash_decode_options_t options = read_options(given, kVersion1);
    check_flags(options.flags, kDecodeFlags);
    check_reserved(options.reserved);
    read_score_options(p, options);
    p.mask_rule = read_mask_rule(options.flags, options.window_left, options.window_right);
    p.causal = (options.flags & FLASH_FLAG_CAUSAL) != 0;
    p.window = read_mask_rule(options.flags & ~FLASH_FLAG_CAUSAL, options.window_left, options.window_right);
    p.rotary_interleaved = (options.flags & FLASH_FLAG_ROTARY_INTERLEAVED) != 0;
    p.invariant_rows = (options.flags & FLASH_FLAG_INVARIANT_ROWS) != 0;
    p.request.num_splits = read_num_splits(options.num_splits);
    if (p.invariant_rows && p.request.num_splits != 0) {
        invalid("num_splits", "must be 0 with FLASH_FLAG_INVARIANT_ROWS", p.request.num_splits);
    }
    p.request.split_size = read_split_size(options.split_size, options.num_splits);
    p.shard = read_cache_shard(options);
    read_request(p.request, options);
    return options;
}

unsigned cache_role(const flash_decode_options_t& options) {
    return options.k_new ? kContiguousRows | kWritten : kContiguousRows;
}

// An append writes the scales if each cached row has its own.
unsigned scale_role(const flash_tensor_t* scale, const flash_decode_options_t& options) {
    return scale && scale->ndim > 2 && options.k_new ? kWritten : kRead;
}

// Whether the rows of both caches begin at the same addresses.
bool have_same_rows(const flash_tensor_t& k, const flash_tensor_t& v) {
    bool same = k.data == v.data && k.dtype == v.dtype && k.ndim == 4 && v.ndim == 4;
    for (int i = 0; same && i < 3; ++i) same = k.shape[i] == v.shape[i] && (k.shape[i] <= 1 || k.stride[i] == v.stride[i]);
    return same;
}

// Whether v_cache is a view of the first channels of k_cache, so that an append has no v_new.
bool is_view_of_k(const flash_tensor_t* k, const flash_tensor_t* v, const flash_decode_options_t& options) {
    if (!k || !v || (options.k_new && options.v_new)) return false;
    return have_same_rows(*k, *v) && v->shape[3] <= k->shape[3];
}

// Only for a call of decode: explain, the workspace query and the call for a schedule accept caches without addresses. Caches
// without elements may have any address.
void check_channels_of_view(const DecodeProblem& p, const flash_tensor_t& k, const flash_tensor_t& v) {
    const bool some = k.shape[0] > 0 && k.shape[1] > 0 && k.shape[2] > 0;
    if (some && p.head_dim_v > p.head_dim && have_same_rows(k, v))
        invalid("v_cache", "as a view of k_cache must have at most the channels of the keys", p.head_dim_v, " of ", p.head_dim);
}

void check_given_together(const DecodeProblem& p) {
    if (p.cache.v_in_k ? p.v_new.present : p.k_new.present != p.v_new.present) {
        invalid(p.k_new.present ? "v_new" : "k_new",
                "k_new and v_new are given together or not at all; without v_new, v_cache must be a view of k_cache",
                "it is missing");
    }
    if (p.cache.k_rope.present && p.k_new.present != p.k_rope_new.present) {
        invalid(p.k_new.present ? "k_rope_new" : "k_new",
                "with k_rope_cache, k_new and k_rope_new are given together or not at all", "it is missing");
    }
    if (!p.cache.k_rope.present && p.k_rope_new.present) {
        invalid("k_rope_cache", "k_rope_new is appended to it", "it is missing");
    }
}

DecodeTensors read_decode_tensors(DecodeProblem& p, Reader& reader, const flash_decode_options_t& options) {
    DecodeTensors tensors;
    tensors.cache_seqlens = reader.optional(options.cache_seqlens, "cache_seqlens", kOfSchedule);
    tensors.block_table = reader.optional(options.block_table, "block_table");
    tensors.batch_idx = reader.optional(options.cache_batch_idx, "cache_batch_idx");
    tensors.leftpad = reader.optional(options.cache_leftpad, "cache_leftpad");
    p.k_new = reader.optional(options.k_new, "k_new", kContiguousRows);
    p.v_new = reader.optional(options.v_new, "v_new", kContiguousRows);
    p.rotary_cos = reader.optional(options.rotary_cos, "rotary_cos", kContiguousRows);
    p.rotary_sin = reader.optional(options.rotary_sin, "rotary_sin", kContiguousRows);
    tensors.slopes = reader.optional(options.alibi_slopes, "alibi_slopes");
    tensors.sink = reader.optional(options.learnable_sink, "learnable_sink");
    tensors.cu_q = reader.optional(options.cu_seqlens_q, "cu_seqlens_q", kOfSchedule);
    tensors.cu_new = reader.optional(options.cu_seqlens_new, "cu_seqlens_new", kOfSchedule);
    tensors.positions = reader.optional(options.q_positions, "q_positions");
    tensors.tree = reader.optional(options.tree_mask, "tree_mask");
    tensors.cu_tree = reader.optional(options.cu_seqlens_tree, "cu_seqlens_tree");
    tensors.shared_groups = reader.optional(options.shared_groups, "shared_groups");
    tensors.shared_lens = reader.optional(options.shared_lens, "shared_lens");
    check_rotary_given(p.rotary_cos, p.rotary_sin);
    if (tensors.block_table.present && tensors.batch_idx.present) {
        invalid("cache_batch_idx", "cannot be given together with block_table", "both are");
    }
    tensors.k_scale = reader.optional(options.k_scale, "k_scale", scale_role(options.k_scale, options));
    tensors.v_scale = reader.optional(options.v_scale, "v_scale", scale_role(options.v_scale, options));
    p.cache.k_rope = reader.optional(options.k_rope_cache, "k_rope_cache", cache_role(options));
    p.k_rope_new = reader.optional(options.k_rope_new, "k_rope_new", kContiguousRows);
    check_given_together(p);
    if (tensors.cu_tree.present && !tensors.tree.present) invalid("cu_seqlens_tree", "needs tree_mask", "there is none");
    if (tensors.cu_new.present && !p.k_new.present) invalid("cu_seqlens_new", "needs k_new and v_new", "there are none");
    return tensors;
}

// The batch size. cu_seqlens_q is checked before q, because it decides how many dimensions q must have.
int64_t batch_of(const DecodeProblem& p, const TensorView& cu) {
    if (!cu.present) return p.q.shape[0];
    check_ndim(cu, "cu_seqlens_q", 1, "(batch + 1,)");
    if (cu.shape[0] < 1) invalid("cu_seqlens_q", "must have batch + 1 entries, so at least one", "it has none");
    return cu.shape[0] - 1;
}

void build_decode_sizes(DecodeProblem& p, const DecodeTensors& tensors, const flash_decode_options_t& options) {
    const bool packed = tensors.cu_q.present;
    p.device = p.q.device;
    p.dtype = p.q.dtype;
    if (is_8_bit(p.dtype))
        refuse(FLASH_STATUS_UNSUPPORTED, "q", "8 bits are for caches only; dtype must be float16, bfloat16, float32 or float64",
               text_of("it is ", p.dtype));
    check_float(p.q, "q");
    check_ndim(p.q, "q", packed ? 3 : 4,
               packed ? "(total_q, heads_q, head_dim) with cu_seqlens_q" : "(batch, seqlen_q, heads_q, head_dim)");
    check_device(p.cache.k, "k_cache", p.device);
    check_device(p.cache.v, "v_cache", p.device);
    check_cache_types(p.cache, p.dtype, "q");
    for (const auto& [view, name] : {std::pair(&p.cache.k, "k_cache"), std::pair(&p.cache.v, "v_cache")}) {
        check_ndim(*view, name, 4, "(batch_cache, capacity, heads_k, channels) or (pages, page_size, heads_k, channels)");
    }
    p.batch = batch_of(p, tensors.cu_q);
    p.q_rows = build_sequences(kQuerySide, p.q, p.batch, tensors.cu_q, {}, 0);
    p.seqlen_q = p.q_rows.capacity;
    p.heads_q = p.q.shape[p.q.ndim - 2];
    p.head_dim = p.q.shape[p.q.ndim - 1];
    p.heads_k = p.cache.k.shape[2];
    p.head_dim_v = p.cache.v.shape[3];
    const int64_t entries = p.cache.k.shape[0], rows = p.cache.k.shape[1];
    if (p.cache.k_rope.present) {
        check_device(p.cache.k_rope, "k_rope_cache", p.device);
        check_dtype(p.cache.k_rope, "k_rope_cache", p.dtype);
        check_ndim(p.cache.k_rope, "k_rope_cache", 4, "those of k_cache, with the last channels of the keys");
        check_shape(p.cache.k_rope, "k_rope_cache", {entries, rows, p.heads_k, p.cache.rope_dim()},
                    "that of k_cache, with the last channels of the keys");
        if (p.cache.rope_dim() < 1 || p.cache.rope_dim() >= p.head_dim) {
            invalid("k_rope_cache", "must have at least 1 channel and fewer than q", p.cache.rope_dim(), " of ", p.head_dim);
        }
    }
    check_shape(p.cache.k, "k_cache", {entries, rows, p.heads_k, p.head_dim - p.cache.rope_dim()},
                p.cache.k_rope.present ? "that of v_cache, with the channels of q that k_rope_cache lacks"
                                       : "that of v_cache, with the head_dim of q");
    check_shape(p.cache.v, "v_cache", {entries, rows, p.heads_k, p.head_dim_v}, "that of k_cache, but for head_dim_v");
    if (p.heads_k == 0 ? p.heads_q != 0 : p.heads_q % p.heads_k != 0) {
        invalid("k_cache", "the heads of q must be a multiple of those of k_cache", "q has ", p.heads_q, ", k_cache has ",
                p.heads_k);
    }
    if (p.head_dim == 0) invalid("q", "head_dim must be at least 1", 0);
    if (p.head_dim_v == 0) invalid("v_cache", "head_dim_v must be at least 1", 0);
    p.softmax_scale = score_scale(p, options.flags, p.head_dim);
}

void check_outputs(const DecodeProblem& p) {
    check_device(p.out, "out", p.device);
    check_partial_dtype(p.out, "out", p.dtype);
    if (p.q_rows.packed())
        check_shape(p.out, "out", {p.seqlen_q, p.heads_q, p.head_dim_v}, "(total_q, heads_q, head_dim_v)");
    else
        check_shape(p.out, "out", {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v}, "(batch, seqlen_q, heads_q, head_dim_v)");
    if (!p.lse.present) return;
    check_device(p.lse, "lse", p.device);
    check_dtype(p.lse, "lse", p.dtype == DType::f64 ? DType::f64 : DType::f32);
    if (p.q_rows.packed())
        check_shape(p.lse, "lse", {p.heads_q, p.seqlen_q}, "(heads_q, total_q)");
    else
        check_shape(p.lse, "lse", {p.batch, p.heads_q, p.seqlen_q}, "(batch, heads_q, seqlen_q)");
}

void build_paged_cache(DecodeProblem& p, const TensorView& table) {
    check_device(table, "block_table", p.device);
    check_dtype(table, "block_table", DType::i32);
    check_ndim(table, "block_table", 2, "(batch, columns)");
    check_shape(table, "block_table", {p.batch, table.shape[1]}, "(batch, columns)");
    p.cache.pages = p.cache.k.shape[0];
    p.cache.page_size = p.cache.k.shape[1];
    if (p.cache.page_size == 0) invalid("k_cache", "page_size must be at least 1", 0);
    p.cache.block_table = static_cast<const int32_t*>(table.data);
    p.cache.block_table_stride[0] = table.stride[0];
    p.cache.block_table_stride[1] = table.stride[1];
    if (__builtin_mul_overflow(table.shape[1], p.cache.page_size, &p.cache.capacity) || p.cache.capacity >= kPositionLimit) {
        invalid("block_table", "columns times page_size must be below 2^40", table.shape[1], " x ", p.cache.page_size);
    }
}

void build_cache(DecodeProblem& p, const DecodeTensors& tensors) {
    p.cache.capacity = p.cache.k.shape[1];
    if (tensors.cache_seqlens.present) {
        p.cache_seqlens = read_int32_vector(tensors.cache_seqlens, "cache_seqlens", p.batch, p.device, "(batch,)");
    }
    if (tensors.block_table.present) {
        build_paged_cache(p, tensors.block_table);
    } else if (tensors.batch_idx.present) {
        p.cache.batch_idx = read_int32_vector(tensors.batch_idx, "cache_batch_idx", p.batch, p.device, "(batch,)");
    } else if (p.cache.k.shape[0] < p.batch) {
        invalid("k_cache", "must have an entry for each sequence, unless cache_batch_idx is given", "batch ", p.batch,
                ", entries ", p.cache.k.shape[0]);
    }
    if (tensors.leftpad.present) p.leftpad = read_int32_vector(tensors.leftpad, "cache_leftpad", p.batch, p.device, "(batch,)");
    p.default_seqlen = p.k_new.present ? 0 : p.cache.capacity;
    if (!p.shard.whole() && !p.cache_seqlens && !p.k_new.present)
        invalid("cache_seqlens", "is required with shard_count: the cache does not tell the lengths of the sequences", "NULL");
    int64_t keys_of_all = 0;
    if (__builtin_mul_overflow(p.cache.capacity, p.shard.count, &keys_of_all) || keys_of_all >= kPositionLimit)
        invalid("shard_count", "times the capacity of the cache must be below 2^40", p.shard.count, " x ", p.cache.capacity);
}

// How many channels of k_cache have the same scale in a row.
int64_t channels_of_scale(const DecodeProblem& p) { return p.cache.k.shape[3] / p.cache.k_scale.groups; }
bool values_end_with_group(const DecodeProblem& p) {
    return p.cache.k_scale.groups == 1 || p.head_dim_v % channels_of_scale(p) == 0;
}

// The scales of a view of k_cache are those of k_cache, unless v_scale is given.
CacheScale scale_of_view(const DecodeProblem& p) {
    const CacheScale& k = p.cache.k_scale;
    CacheScale scale = k;
    if (k.groups == 1) return scale;
    const int64_t group = channels_of_scale(p);
    if (!values_end_with_group(p)) {
        if (p.k_new.present && k.of_rows)
            invalid("head_dim_v",
                    "must be a multiple of the channels that share a scale of k_cache if an append computes k_scale",
                    p.head_dim_v, " and ", group);
        invalid("v_scale", "is required if head_dim_v is not a multiple of the channels that share a scale of k_cache",
                p.head_dim_v, " and ", group);
    }
    scale.groups = p.head_dim_v / group;
    return scale;
}

// An append to k_cache computes and writes scales of k_cache alone.
void check_scale_beside_append(const DecodeProblem& p, const TensorView& v_scale) {
    if (p.cache.k_scale.of_rows)
        invalid("v_scale", "must be NULL if v_cache is a view of k_cache and an append computes k_scale", "it is given");
    if (p.cache.v_scale.of_rows)
        invalid("v_scale",
                "must have 1 or 2 dimensions if v_cache is a view of k_cache and keys are appended: no append writes it",
                "it has ", v_scale.ndim);
}

// `addresses`: whether the caches have addresses. If not, caches with the same strides count as one, unless only two separate
// caches can have these scales.
void build_scales(DecodeProblem& p, const DecodeTensors& tensors, bool addresses) {
    const TensorView& k = p.cache.k;
    CacheScaleSizes sizes{p.batch, k.shape[0], k.shape[1], p.heads_k, k.shape[3]};
    if (tensors.k_scale.present) p.cache.k_scale = build_cache_scale(tensors.k_scale, "k_scale", sizes, p.device);
    check_scale_given(p.cache, p.cache.k_scale, "k_scale", p.k_new.present);
    sizes.channels = p.head_dim_v;
    if (!addresses && !p.k_new.present && !tensors.v_scale.present && !values_end_with_group(p)) p.cache.v_in_k = false;
    if (tensors.v_scale.present) {
        p.cache.v_scale = build_cache_scale(tensors.v_scale, "v_scale", sizes, p.device);
        if (p.cache.v_in_k && p.k_new.present) check_scale_beside_append(p, tensors.v_scale);
    } else if (p.cache.v_in_k && p.cache.k_scale.present) {
        p.cache.v_scale = scale_of_view(p);
    }
    check_scale_given(p.cache, p.cache.v_scale, "v_scale", p.k_new.present);
}

void check_new_shapes(const DecodeProblem& p, bool packed) {
    const int64_t rows = p.k_new.shape[packed ? 0 : 1], channels = p.cache.k.shape[3];
    const auto check = [&](const TensorView& view, const char* name, int64_t of_row, const std::string& last) {
        if (!view.present) return;
        const std::string names = text_of(packed ? "(total_new, heads_k, " : "(batch, seqlen_new, heads_k, ", last, ")");
        if (packed)
            check_shape(view, name, {rows, p.heads_k, of_row}, names.c_str());
        else
            check_shape(view, name, {p.batch, rows, p.heads_k, of_row}, names.c_str());
    };
    check(p.k_new, "k_new", channels, p.cache.k_rope.present ? "channels of k_cache" : "head_dim");
    check(p.v_new, "v_new", p.head_dim_v, "head_dim_v");
    check(p.k_rope_new, "k_rope_new", p.cache.rope_dim(), "channels of k_rope_cache");
    if (!packed && p.shard.whole() && rows > p.cache.capacity)
        invalid("k_new", "must not have more rows than the cache", rows, " of ", p.cache.capacity);
}

void build_appended(DecodeProblem& p, const DecodeTensors& tensors) {
    p.new_rows.batch = p.batch;
    if (!p.k_new.present) return;
    for (const auto& [view, name] :
         {std::pair(&p.k_new, "k_new"), std::pair(&p.v_new, "v_new"), std::pair(&p.k_rope_new, "k_rope_new")}) {
        if (!view->present) continue;
        check_device(*view, name, p.device);
        check_dtype(*view, name, p.dtype);
    }
    const bool packed = tensors.packs_new();
    check_ndim(p.k_new, "k_new", packed ? 3 : 4,
               packed ? "(total_new, heads_k, head_dim) with cu_seqlens" : "(batch, seqlen_new, heads_k, head_dim)");
    check_new_shapes(p, packed);
    p.new_rows = build_sequences(new_side(tensors.cu_new.present), p.k_new, p.batch,
                                 tensors.cu_new.present ? tensors.cu_new : tensors.cu_q, {}, 0);
    p.seqlen_new = p.new_rows.capacity;
}

void build_positions(DecodeProblem& p, const TensorView& positions) {
    check_device(positions, "q_positions", p.device);
    check_dtype(positions, "q_positions", DType::i32);
    if (p.q_rows.packed())
        check_shape(positions, "q_positions", {p.seqlen_q}, "(total_q,)");
    else
        check_shape(positions, "q_positions", {p.batch, p.seqlen_q}, "(batch, seqlen_q)");
    check_contiguous(positions, "q_positions");
    p.positions = static_cast<const int32_t*>(positions.data);
}

void build_tree(DecodeProblem& p, const TensorView& tree, const TensorView& cu) {
    check_device(tree, "tree_mask", p.device);
    check_dtype(tree, "tree_mask", DType::i32);
    check_ndim(tree, "tree_mask", 2, "(rows, words)");
    if (cu.present) {
        p.tree.rows = build_sequences(kTreeSide, tree, p.batch, cu, {}, 0);
    } else {
        const int64_t rows = p.q_rows.packed() ? p.seqlen_q : p.batch * p.seqlen_q;
        check_shape(tree, "tree_mask", {rows, tree.shape[1]}, "(query rows, words) without cu_seqlens_tree");
        p.tree.rows = p.q_rows;
    }
    p.tree.data = static_cast<const int32_t*>(tree.data);
    p.tree.stride[0] = tree.shape[0] > 1 ? tree.stride[0] : 0;
    p.tree.stride[1] = tree.shape[1] > 1 ? tree.stride[1] : 0;
    p.tree.words = tree.shape[1];
}

void check_tree_contents(const DecodeProblem& p) {
    for (int64_t b = 0; p.positions && b < p.batch; ++b)
        for (int64_t row = 0; row < p.q_rows.length(b); ++row) {
            const int32_t position = p.positions[p.q_rows.before(b) + row];
            if (position < 0) invalid("q_positions", "must be at least 0", "row ", row, " of sequence ", b, " has ", position);
        }
    if (!p.tree.data) return;
    if (p.tree.rows.cu != p.q_rows.cu) check_lengths(kTreeSide, p.tree.rows, 0);
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t rows = p.tree.rows.length(b), length = p.q_rows.length(b);
        if (rows == 0) continue;
        if (rows != length) {
            invalid("cu_seqlens_tree", "a sequence must have as many rows as query rows, or none", "sequence ", b, " has ", rows,
                    ", q has ", length);
        }
        if (length > 32 * p.tree.words)
            invalid("tree_mask", "must have a bit for each query row of a sequence", "sequence ", b, " has ", length, " rows, ",
                    32 * p.tree.words, " bits");
    }
}

}  // namespace

DecodeProblem make_decode_problem(const flash_tensor_t* q, const flash_tensor_t* k_cache, const flash_tensor_t* v_cache,
                                  const flash_tensor_t* out, const flash_tensor_t* lse, const flash_decode_options_t* given,
                                  Reading reading, const flash_tensor_t* schedule) {
    DecodeProblem problem;
    const flash_decode_options_t options = read_decode_options(problem, given);
    Reader reader(reading);
    problem.q = reader.required(q, "q", kContiguousRows);
    problem.cache.k = reader.required(k_cache, "k_cache", cache_role(options));
    problem.cache.v_in_k = is_view_of_k(k_cache, v_cache, options);
    problem.cache.v = reader.required(v_cache, "v_cache", cache_role(options) | (problem.cache.v_in_k ? kUnrecorded : kRead));
    problem.out = reader.required(out, "out", kContiguousRows | kWritten);
    problem.lse = reader.optional(lse, "lse", kWritten);
    const DecodeTensors tensors = read_decode_tensors(problem, reader, options);
    problem.writes_schedule = reading == Reading::schedule;
    problem.schedule = problem.writes_schedule ? reader.required(schedule, "schedule", kWritten | kOfSchedule)
                                               : reader.optional(options.schedule, "schedule");

    build_decode_sizes(problem, tensors, options);
    if (reader.is_call()) check_channels_of_view(problem, *k_cache, *v_cache);
    check_outputs(problem);
    build_cache(problem, tensors);
    build_appended(problem, tensors);
    build_scales(problem, tensors, reader.is_call() && k_cache->data);  // else they may have none
    if (problem.rotary_cos.present) {
        check_rotary_tables(problem.rotary_cos, problem.rotary_sin, problem.cache, problem.dtype, problem.device);
    }
    if (tensors.positions.present) build_positions(problem, tensors.positions);
    if (tensors.tree.present) build_tree(problem, tensors.tree, tensors.cu_tree);
    build_shared_keys(problem, tensors.shared_groups, tensors.shared_lens);
    if (tensors.slopes.present) {
        problem.alibi_slopes = build_slopes(tensors.slopes, problem.batch, problem.heads_q, problem.dtype, problem.device);
    }
    if (tensors.sink.present) {
        problem.sink = build_head_vector(tensors.sink, "learnable_sink", problem.heads_q, problem.dtype, problem.device);
        if (problem.shard.index > 0) problem.sink = {};  // only shard 0 uses it, so that it counts once
    }
    if (problem.schedule.present) check_schedule_type(problem.schedule, problem.device);
    if (reader.may_read_data(problem.device)) {
        check_lengths(kQuerySide, problem.q_rows, 0);
        check_lengths(new_side(tensors.cu_new.present), problem.new_rows, 0);
        check_tree_contents(problem);
        check_cache_contents(problem);
        check_shared_keys(problem);
    }
    reader.check_overlap();
    return problem;
}

}  // namespace libflash
