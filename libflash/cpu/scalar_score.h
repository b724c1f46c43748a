// One query head of one sequence for the scalar reference: its rows, the visible keys of a row, the scores. Follows the
// definition in libflash.h, one element at a time, in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/convert.h"
#include "cpu/philox.h"
#include "problem/attention.h"

namespace libflash::cpu {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// The rows of one head of one sequence; channels are contiguous.
template <class T>
struct Rows {
    T* data = nullptr;
    int64_t stride = 0;
    T* operator[](int64_t row) const { return data + row * stride; }
};

template <class T>
Rows<T> rows_of(const TensorView& tensor, const Sequences& sequences, int64_t batch, int64_t head) {
    if (!tensor.present) return {};
    const RowStrides at = row_strides(tensor);
    return {static_cast<T*>(tensor.data) + batch * at.batch + sequences.start(batch) * at.row + head * at.head, at.row};
}

// The rows of one head of a tensor of any floating type: an output that may be wider than the inputs.
struct AnyRows {
    DType dtype = DType::none;
    void* data = nullptr;
    int64_t base = 0, stride = 0;

    AnyRows(const TensorView& tensor, const Sequences& sequences, int64_t batch, int64_t head)
        : dtype(tensor.dtype), data(tensor.data) {
        const RowStrides at = row_strides(tensor);
        stride = at.row;
        base = batch * at.batch + sequences.start(batch) * at.row + head * at.head;
    }
    double get(int64_t row, int64_t channel) const { return load_as(dtype, data, base + row * stride + channel); }
    void set(int64_t row, int64_t channel, double value) const { store_as(dtype, data, base + row * stride + channel, value); }
};

// lse, dlse or delta of one head: float, or double with double tensors.
struct LseRows {
    DType dtype = DType::none;
    void* data = nullptr;
    int64_t base = 0, stride = 0;

    LseRows(const TensorView& tensor, const Sequences& sequences, int64_t batch, int64_t head) {
        if (!tensor.present) return;
        const RowStrides at = lse_strides(tensor);
        dtype = tensor.dtype, data = tensor.data, stride = at.row;
        base = batch * at.batch + sequences.start(batch) * at.row + head * at.head;
    }
    double get(int64_t row) const { return data ? load_as(dtype, data, base + row * stride) : 0.0; }
    void set(int64_t row, double value) const {
        if (data) store_as(dtype, data, base + row * stride, value);
    }
};

inline double head_value(const HeadTensor& tensor, int64_t batch, int64_t head) {
    return load_as(tensor.dtype, tensor.data, batch * tensor.batch_stride + head * tensor.head_stride);
}

inline double value_or_zero(const HeadTensor& tensor, int64_t batch, int64_t head) {
    return tensor.present ? head_value(tensor, batch, head) : 0.0;
}

inline int64_t element_at(const ScoreTensor& tensor, int64_t b, int64_t h, int64_t i, int64_t j) {
    return b * tensor.stride[0] + h * tensor.stride[1] + i * tensor.stride[2] + j * tensor.stride[3];
}

inline bool block_kept(const BlockMask& blocks, int64_t b, int64_t h, int64_t row, int64_t column) {
    if (!blocks.has_lists) {
        const int64_t* at = blocks.mask_stride;
        return blocks.mask[b * at[0] + h * at[1] + row * at[2] + column * at[3]] != 0;
    }
    const int64_t *at = blocks.row_indices_stride, *count_at = blocks.row_counts_stride;
    const int32_t* list = blocks.row_indices + b * at[0] + h * at[1] + row * at[2];
    const int32_t count = blocks.row_counts[b * count_at[0] + h * count_at[1] + row * count_at[2]];
    for (int32_t n = 0; n < count; ++n)
        if (list[n * at[3]] == column) return true;
    return false;
}

template <class A, class B>
double dot(const A* a, const B* b, int64_t n) {
    double sum = 0;
    for (int64_t c = 0; c < n; ++c) sum += static_cast<double>(widen(a[c])) * static_cast<double>(widen(b[c]));
    return sum;
}

struct Score {
    double value;
    double slope;  // derivative of the softcap; 1 without softcap
};

inline Score softcapped(double z, double softcap) {
    if (softcap == 0) return {z, 1.0};
    const double tanh_value = std::tanh(z / softcap);
    return {softcap * tanh_value, 1.0 - tanh_value * tanh_value};
}

// The score, without bias, of a query row and a key with the given dot product. `distance`: the row's position minus that of the
// key, as ALiBi counts them.
inline Score score_of(const ScoreOptions& options, double product, double alibi_slope, int64_t distance) {
    Score s = softcapped(options.softmax_scale * product, options.softcap);
    if (options.alibi_slopes.present) s.value -= alibi_slope * static_cast<double>(std::abs(distance));
    return s;
}

template <class T>
struct ScalarHead {
    const AttentionProblem& problem;
    const int64_t batch, head, key_head, length_q, length_k;
    const SequencePositions positions;
    const Rows<const T> q, k, v;
    const double alibi_slope;
    const DropoutMask dropout;

    ScalarHead(const AttentionProblem& p, int64_t b, int64_t h)
        : problem(p), batch(b), head(h), key_head(h / p.group_size()), length_q(p.q_rows.length(b)), length_k(p.k_rows.length(b)),
          positions(p, b), q(rows_of<const T>(p.q, p.q_rows, b, h)), k(rows_of<const T>(p.k, p.k_rows, b, key_head)),
          v(rows_of<const T>(p.v, p.k_rows, b, key_head)), alibi_slope(value_or_zero(p.alibi_slopes, b, h)),
          dropout(p, b, h, positions) {}

    // Row i sees the keys of [first_key, last_key) for which visible() is true.
    int64_t first_key(int64_t i) const { return positions.first_key(problem.mask_rule, i, length_k); }
    int64_t last_key(int64_t i) const { return positions.last_key(problem.mask_rule, i, length_k); }
    bool in_band(int64_t i, int64_t j) const { return j >= first_key(i) && j < last_key(i); }

    bool visible(int64_t i, int64_t j) const {
        const BlockMask& blocks = problem.block_mask;
        if (blocks.present && !block_kept(blocks, batch, head, i / FLASH_BLOCK_SIZE, j / FLASH_BLOCK_SIZE)) return false;
        const ScoreTensor& mask = problem.mask;
        if (mask.present && !static_cast<const uint8_t*>(mask.data)[element_at(mask, batch, head, i, j)]) return false;
        return !problem.bias.present || bias(i, j) != kMinusInfinity;  // -infinity hides whatever the score is
    }

    double bias(int64_t i, int64_t j) const {
        return load_as(problem.bias.dtype, problem.bias.data, element_at(problem.bias, batch, head, i, j));
    }

    Score score(int64_t i, int64_t j) const {
        const int64_t distance = positions.alibi_row(i) - positions.alibi_column(j);
        Score s = score_of(problem, dot(q[i], k[j], problem.head_dim), alibi_slope, distance);
        if (problem.bias.present) s.value += bias(i, j);
        return s;
    }

    // 0 or Dropout::keep_factor(); 1 without dropout.
    double keep(int64_t i, int64_t j) const { return problem.dropout.active() ? dropout.factor(i, j) : 1.0; }
};

// The softmax statistics of one row in two passes: first the row maximum, then the row sum. Used by forward and decode.
struct SoftmaxRow {
    double row_max = kMinusInfinity;
    double row_sum = 0;

    void update_max(double score) {
        if (score > row_max || std::isnan(score)) row_max = score;
    }
    bool empty() const { return row_max == kMinusInfinity; }
    // Adds exp(score - row_max) to the row sum and returns it.
    double add(double score) {
        const double weight = std::exp(score - row_max);
        row_sum += weight;
        return weight;
    }
    double lse() const { return empty() ? kMinusInfinity : row_max + std::log(row_sum); }
};

}  // namespace
}  // namespace libflash::cpu
