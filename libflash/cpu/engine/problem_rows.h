// Rows of one head of one sequence, the keys that its queries see, and the division of sequences into tiles.
#pragma once

#include "cpu/engine/score.h"
#include "problem/attention.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

template <class T>
FLASH_INLINE StridedRows<T> rows_of(const TensorView& tensor, const Sequences& sequences, int64_t batch, int64_t head) {
    if (!tensor.present) return {};
    const RowStrides at = row_strides(tensor);
    return {static_cast<T*>(tensor.data) + batch * at.batch + sequences.start(batch) * at.row + head * at.head, at.row};
}

// The rows of lse, dlse or delta, which have the accumulator type.
template <class A>
FLASH_INLINE StridedRows<A> lse_rows_of(const TensorView& tensor, const Sequences& sequences, int64_t batch, int64_t head) {
    if (!tensor.present) return {};
    const RowStrides at = lse_strides(tensor);
    return {static_cast<A*>(tensor.data) + batch * at.batch + sequences.start(batch) * at.row + head * at.head, at.row};
}

// Rows of an output of one head that may have the accumulator type beside 16-bit inputs.
template <class T>
struct ResultRows {
    using A = Acc<T>;
    void* data = nullptr;
    int64_t stride = 0;  // in elements
    bool wide = false;

    ResultRows(const TensorView& tensor, const Sequences& sequences, int64_t batch, int64_t head) {
        if (!tensor.present) return;
        wide = element_bytes(tensor.dtype) != static_cast<int64_t>(sizeof(T));
        const RowStrides at = row_strides(tensor);
        const int64_t first = batch * at.batch + sequences.start(batch) * at.row + head * at.head;
        data = static_cast<char*>(tensor.data) + first * element_bytes(tensor.dtype), stride = at.row;
    }
    FLASH_INLINE A* wide_row(int64_t row) const { return static_cast<A*>(data) + row * stride; }
    FLASH_INLINE T* row(int64_t r) const { return static_cast<T*>(data) + r * stride; }

    // `count`: how many channels there are from `channel` on; lanes of the vector beyond them are not stored.
    FLASH_INLINE void store(int64_t r, int64_t channel, Vec<A> v, int64_t count) const {
        if (wide)
            store_part(wide_row(r) + channel, v, count);
        else
            store_part(row(r) + channel, v, count);
    }
    FLASH_INLINE Vec<A> load(int64_t r, int64_t channel, int64_t count) const {
        return wide ? load_part(wide_row(r) + channel, count) : load_part(row(r) + channel, count);
    }
    FLASH_INLINE void add(int64_t r, int64_t channel, Vec<A> v, int64_t count) const {
        store(r, channel, load(r, channel, count) + v, count);
    }
    void clear(int64_t r, int64_t channels) const {
        if (wide)
            std::memset(static_cast<void*>(wide_row(r)), 0, static_cast<size_t>(channels) * sizeof(A));
        else
            std::memset(static_cast<void*>(row(r)), 0, static_cast<size_t>(channels) * sizeof(T));
    }
};

FLASH_INLINE double head_value(const HeadTensor& tensor, int64_t batch, int64_t head) {
    return load_as(tensor.dtype, tensor.data, batch * tensor.batch_stride + head * tensor.head_stride);
}

// Sets lanes for rows [row0, row0 + rows) of query head `head`: visible keys and ALiBi.
template <class A>
static void set_lanes(Lanes<A>& lanes, const AttentionProblem& problem, int64_t batch, int64_t head, int64_t row0, int64_t rows) {
    const int64_t length_k = problem.k_rows.length(batch);
    const SequencePositions positions(problem, batch);
    lanes.resize(rows);
    lanes.row0 = row0;
    const bool alibi = problem.alibi_slopes.present;
    const A slope = alibi ? static_cast<A>(head_value(problem.alibi_slopes, batch, head)) : A(0);
    for (int64_t i = 0; i < rows; ++i) {
        lanes.first_key[i] = static_cast<Integer<A>>(positions.first_key(problem.mask_rule, row0 + i, length_k));
        lanes.last_key[i] = static_cast<Integer<A>>(positions.last_key(problem.mask_rule, row0 + i, length_k));
        if (alibi) lanes.alibi_position[i] = static_cast<A>(positions.alibi_row(row0 + i)), lanes.alibi_slope[i] = slope;
    }
    lanes.set_ranges();
}

template <class A>
FLASH_INLINE ScoreRule<A> score_rule(const AttentionProblem& problem, int64_t batch, int64_t head) {
    ScoreRule<A> rule;
    if (problem.bias.present) rule.bias = &problem.bias;
    if (problem.mask.present) rule.mask = &problem.mask;
    rule.batch = batch, rule.head = head;
    rule.set(problem);
    if (rule.alibi) {
        const SequencePositions positions(problem, batch);
        rule.columns = positions.columns, rule.first_column = positions.first_column;
    }
    return rule;
}

// One row of a block mask. Columns must be queried in ascending order.
class BlockMaskRow {
public:
    BlockMaskRow() = default;
    BlockMaskRow(const BlockMask& blocks, int64_t batch, int64_t head, int64_t row) : all_(!blocks.present) {
        if (all_) return;
        if (blocks.has_lists) {
            const int64_t *at = blocks.row_indices_stride, *count_at = blocks.row_counts_stride;
            list_ = blocks.row_indices + batch * at[0] + head * at[1] + row * at[2];
            step_ = at[3];
            left_ = blocks.row_counts[batch * count_at[0] + head * count_at[1] + row * count_at[2]];
        } else {
            const int64_t* at = blocks.mask_stride;
            mask_ = blocks.mask + batch * at[0] + head * at[1] + row * at[2];
            step_ = at[3];
        }
    }
    bool kept(int64_t column) {
        if (all_) return true;
        if (mask_) return mask_[column * step_] != 0;
        for (; left_ > 0 && *list_ < column; --left_) list_ += step_;
        return left_ > 0 && *list_ == column;
    }

private:
    bool all_ = true;
    const uint8_t* mask_ = nullptr;
    const int32_t* list_ = nullptr;
    int64_t step_ = 0;
    int32_t left_ = 0;
};

// Divides sequences into tiles of `size` rows and numbers them. In packed tensors a sequence may get one number more than it has
// tiles, so that numbers follow from cu_seqlens alone; such a number has no tile.
class Tiling {
public:
    Tiling(const Sequences& sequences, int64_t size) : sequences_(sequences), size_(size) {}

    struct Tile {
        int64_t batch, first_row;
    };
    // An upper bound of the number of tiles, which does not read cu_seqlens.
    int64_t count() const {
        if (sequences_.batch == 0) return 0;  // a packed tensor may have rows but no sequence
        if (sequences_.packed()) return sequences_.capacity / size_ + sequences_.batch;
        return sequences_.batch * per_sequence();
    }
    int64_t first_tile(int64_t batch) const {
        return sequences_.packed() ? sequences_.cu[batch] / size_ + batch : batch * per_sequence();
    }
    // batch is -1 for a number without a tile.
    Tile at(int64_t tile) const {
        if (!sequences_.packed()) return {tile / per_sequence(), tile % per_sequence() * size_};
        int64_t low = 0, high = sequences_.batch;  // binary search for the last sequence whose first number is <= tile
        while (low + 1 < high) {
            const int64_t middle = (low + high) / 2;
            (first_tile(middle) <= tile ? low : high) = middle;
        }
        const int64_t row = (tile - first_tile(low)) * size_;
        if (row < 0 || row >= sequences_.owned(low)) return {-1, 0};
        return {low, row};
    }

private:
    int64_t per_sequence() const { return (sequences_.capacity + size_ - 1) / size_; }
    const Sequences& sequences_;
    int64_t size_;
};

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
