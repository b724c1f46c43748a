// Conversions from a checked problem to the parameter structs of the kernels. Host only, no CUDA header.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/attention/params.h"
#include "problem/attention.h"
#include "problem/decode.h"

namespace libflash::cuda {

template <class T, size_t n>
void copy_array(T (&to)[n], const T (&from)[n]) {
    std::copy(from, from + n, to);
}

// The stride of a dimension with one element has no meaning; 0 keeps it from failing the alignment checks.
inline RowsParams rows_params(const TensorView& tensor) {
    const RowStrides strides = row_strides(tensor);
    const bool dense = tensor.ndim == 4;
    const int64_t batch = dense ? tensor.shape[0] : 1, rows = tensor.shape[tensor.ndim - 3],
                  heads = tensor.shape[tensor.ndim - 2];
    return {tensor.data, batch <= 1 ? 0 : strides.batch, rows <= 1 ? 0 : strides.row, heads <= 1 ? 0 : strides.head};
}

// Whether every row can be accessed `vector_bytes` at a time. `element`: bytes of an element.
inline bool rows_fit_vectors(const RowsParams& rows, int64_t channels, int64_t element, int64_t vector_bytes = 16) {
    const auto fits = [&](int64_t elements) { return elements * element % vector_bytes == 0; };
    return reinterpret_cast<uintptr_t>(rows.data) % static_cast<uintptr_t>(vector_bytes) == 0 && fits(rows.batch) &&
           fits(rows.row) && fits(rows.head) && fits(channels);
}

inline RowStatisticsParams row_statistics_params(const TensorView& tensor) {
    if (!tensor.present) return {};
    const RowStrides strides = lse_strides(tensor);
    return {static_cast<float*>(tensor.data), strides.batch, strides.row, strides.head};
}

inline LengthsParams lengths_params(const Sequences& rows) { return {rows.cu, rows.used, static_cast<int32_t>(rows.capacity)}; }

inline int32_t window_side(int64_t keys) { return keys >= kUnboundedWindow ? kUnboundedWindow : static_cast<int32_t>(keys); }

inline MaskParams mask_params(const MaskRule& rule) { return {window_side(rule.left), window_side(rule.right), rule.top_left}; }

inline ScoreParams score_params(const ScoreTensor& tensor) {
    ScoreParams params{};
    if (!tensor.present) return params;
    params.data = tensor.data;
    copy_array(params.stride, tensor.stride);
    params.is_float = tensor.dtype == DType::f32;
    return params;
}

inline ScoreGradientParams score_gradient_params(const ScoreTensor& tensor) {
    ScoreGradientParams params{};
    if (!tensor.present) return params;
    params.data = tensor.data;
    params.is_float = tensor.dtype == DType::f32;
    copy_array(params.stride, tensor.stride);
    for (int i = 0; i < 4; ++i) params.extent[i] = static_cast<int32_t>(tensor.shape[i]);
    return params;
}

inline HeadParams head_params(const HeadTensor& tensor) {
    if (!tensor.present) return {};
    return {tensor.data, tensor.batch_stride, tensor.head_stride, tensor.dtype == DType::f32};
}

inline HeadGradientParams head_gradient_params(const HeadTensor& tensor) {
    if (!tensor.present) return {};
    return {tensor.data, tensor.head_stride, tensor.dtype == DType::f32};
}

// `rows`: the row lists (for forward and dQ), else the column lists (for dK/dV).
inline BlockMaskParams block_mask_params(const BlockMask& blocks, bool rows) {
    BlockMaskParams params{};
    if (!blocks.present) return params;
    if (blocks.has_lists) {
        params.counts = rows ? blocks.row_counts : blocks.col_counts;
        params.indices = rows ? blocks.row_indices : blocks.col_indices;
        copy_array(params.counts_stride, rows ? blocks.row_counts_stride : blocks.col_counts_stride);
        copy_array(params.indices_stride, rows ? blocks.row_indices_stride : blocks.col_indices_stride);
    } else {
        params.mask = blocks.mask;
        copy_array(params.mask_stride, blocks.mask_stride);
    }
    return params;
}

inline DropoutParams dropout_params(const Dropout& dropout) {
    DropoutParams params{};
    params.keep_factor = static_cast<float>(dropout.keep_factor());
    params.active = dropout.active();
    params.threshold = dropout.threshold() << 16;
    params.state = dropout.state;
    params.seed_low = static_cast<uint32_t>(dropout.seed);
    params.seed_high = static_cast<uint32_t>(dropout.seed >> 32);
    params.offset_mix = static_cast<uint32_t>(dropout.offset) ^ (static_cast<uint32_t>(dropout.offset >> 32) * 0x9E3779B9u);
    return params;
}

inline RareParams rare_params(const AttentionProblem& problem) {
    return {static_cast<float>(problem.softcap), head_params(problem.alibi_slopes), score_params(problem.bias),
            score_params(problem.mask), dropout_params(problem.dropout)};
}

inline DoubleParams double_params(const AttentionProblem& problem) {
    return {problem.softmax_scale, problem.softcap, problem.dropout.keep_factor()};
}

// The name of the first rare option that the problem uses, or nullptr.
inline const char* rare_option(const AttentionProblem& problem) {
    if (problem.softcap > 0) return "softcap";
    if (problem.dropout.active()) return "dropout_p";
    if (problem.alibi_slopes.present) return "alibi_slopes";
    if (problem.bias.present) return "bias";
    if (problem.mask.present) return "mask";
    return nullptr;
}

// Whether the problem needs the general instance of a kernel.
inline bool has_rare_options(const AttentionProblem& problem) { return rare_option(problem) || !(problem.softmax_scale > 0); }

// Whether rows of q, k and v can be read 16 bytes at a time and head dims are multiples of 16 bytes.
inline bool loads_in_vectors(const AttentionProblem& problem) {
    const int64_t element = element_bytes(problem.dtype);
    const auto fits = [&](const TensorView& tensor, int64_t dim) { return rows_fit_vectors(rows_params(tensor), dim, element); };
    return fits(problem.q, problem.head_dim) && fits(problem.k, problem.head_dim) && fits(problem.v, problem.head_dim_v);
}

// Whether sequences may have different numbers of rows, or rows have given positions or a tree.
inline bool has_ragged_rows(const DecodeProblem& problem) { return problem.packed() || problem.positions || problem.tree.data; }

inline bool has_scales(const KvCache& cache) { return cache.k_scale.present || cache.v_scale.present; }

// Whether decode needs the general instance, which also supports sequences with different numbers of rows.
inline bool has_rare_options(const DecodeProblem& problem) {
    const KvCache& cache = problem.cache;
    const bool scaled = cache.dtype == problem.dtype && has_scales(cache);
    return cache.k_scale.groups > 1 || cache.v_scale.groups > 1 || cache.k_rope.present || !problem.shard.whole() ||
           (problem.out.present && problem.out.dtype != problem.dtype) || problem.invariant_rows ||
           (scaled && has_ragged_rows(problem));
}

// Whether decode needs an instance for sequences with different numbers of rows.
inline bool is_ragged(const DecodeProblem& problem) { return has_ragged_rows(problem) || has_rare_options(problem); }

// Whether a kernel that has the instance for invariant rows uses it. With codes, scales, rope parts or shards of the cache, the
// general instance computes invariant rows. Its arithmetic is different: equal bits are only required of calls that agree in
// these options.
inline bool has_plain_invariant_rows(const DecodeProblem& problem) {
    const KvCache& cache = problem.cache;
    return problem.invariant_rows && cache.dtype == problem.dtype && !has_scales(cache) && !cache.k_rope.present &&
           problem.shard.whole();
}

// Query rows of a sequence; packed: the mean, because only the device knows the lengths.
inline int64_t mean_rows(const DecodeProblem& problem) {
    if (!problem.q_rows.packed() || problem.batch == 0) return problem.seqlen_q;
    return (problem.seqlen_q + problem.batch - 1) / problem.batch;
}

// Channels of a rotated query in the workspace, rounded up to whole 16-byte vectors.
inline int64_t padded_channels(const DecodeProblem& problem) {
    const int64_t vector = 16 / element_bytes(problem.dtype);
    return (problem.head_dim + vector - 1) / vector * vector;
}

// Fills the sizes and the scale, which the parameters of all attention kernels have.
template <class Params, class Problem>
void fill_in_sizes(Params& params, const Problem& problem) {
    constexpr double kLog2e = 1.4426950408889634;
    params.batch = static_cast<int32_t>(problem.batch);
    params.heads_q = static_cast<int32_t>(problem.heads_q);
    params.group_size = static_cast<int32_t>(problem.group_size());
    params.head_dim = static_cast<int32_t>(problem.head_dim);
    params.head_dim_v = static_cast<int32_t>(problem.head_dim_v);
    params.softmax_scale = static_cast<float>(problem.softmax_scale);
    params.scale_log2 = static_cast<float>(problem.softmax_scale * kLog2e);
}

// Fills the fields that forward and backward share.
template <class Params>
void fill_in_problem(Params& params, const AttentionProblem& problem) {
    fill_in_sizes(params, problem);
    params.q = rows_params(problem.q);
    params.k = rows_params(problem.k);
    params.v = rows_params(problem.v);
    params.out = rows_params(problem.out);
    params.lse = row_statistics_params(problem.lse);
    params.sink = head_params(problem.sink);
    params.rare = rare_params(problem);
    params.in_double = double_params(problem);
    params.q_lengths = lengths_params(problem.q_rows);
    params.k_lengths = lengths_params(problem.k_rows);
    params.mask = mask_params(problem.mask_rule);
}

// For backward and backward_tangent without query heads. The kernels assume that each key head has query heads, so each key head
// gets one query head without query rows. It also has no block lists and no ALiBi slope, since the kernels would read them.
template <class Params>
void leave_out_queries(Params& params) {
    params.q_lengths = {};
    params.group_size = 1;
    params.block_rows = params.block_cols = {};
    params.rare.alibi_slopes = {};
}

}  // namespace libflash::cuda
