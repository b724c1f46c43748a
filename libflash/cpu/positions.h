// The positions of the rows and keys of one sequence. Internal linkage for the reason given in convert.h.
#pragma once

#include <cstdint>

#include "problem/attention.h"

namespace libflash::cpu {
namespace {

// The positions of rows or of keys, strictly increasing: begin + i * step, or the elements of an array.
struct RowNumbers {
    int64_t begin = 0, step = 1;
    const int32_t* of_rows = nullptr;

    int64_t operator()(int64_t i) const { return of_rows ? of_rows[i] : begin + i * step; }

    // The first of `count` rows whose position is at least `position`; `count` if there is none.
    int64_t first_from(int64_t position, int64_t count) const {
        if (!of_rows) {
            const int64_t distance = position - begin;
            const int64_t row = distance <= 0 ? 0 : (distance + step - 1) / step;
            return row < count ? row : count;
        }
        int64_t low = 0, high = count;
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (of_rows[middle] < position)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }
};

inline RowNumbers numbers_of(const Positions& given, const Sequences& sequences, int64_t batch) {
    if (given.of_rows) return {0, 1, given.of_rows + batch * given.batch_stride + sequences.start(batch)};
    return {given.begins ? given.begins[batch] : given.begin, given.step, nullptr};
}

// The positions of the rows and keys of one sequence. Without FLASH_FLAG_POSITIONS keys are numbered from 0, and the number of a
// row depends on the option: dropout counts from 0; the mask rule adds mask_shift, which is 0 for an alignment at the top left;
// ALiBi adds alibi_shift, which always aligns the last row with the last key.
struct SequencePositions {
    RowNumbers rows, columns;
    int64_t mask_shift = 0, alibi_shift = 0;  // added to the number of a row; 0 with FLASH_FLAG_POSITIONS
    int64_t first_column = 0;                 // position of the first key

    SequencePositions(const AttentionProblem& p, int64_t batch) {
        if (p.has_positions) {
            rows = numbers_of(p.row_positions, p.q_rows, batch);
            columns = numbers_of(p.column_positions, p.k_rows, batch);
            if (p.k_rows.length(batch) > 0) first_column = columns(0);
        } else {
            const int64_t length_q = p.q_rows.length(batch), length_k = p.k_rows.length(batch);
            mask_shift = p.mask_rule.shift(length_q, length_k);
            alibi_shift = length_k - length_q;
        }
    }

    // Row i sees keys [first, last) of `count`.
    int64_t first_key(const MaskRule& rule, int64_t i, int64_t count) const {
        return columns.first_from(rule.first(rows(i), mask_shift), count);
    }
    int64_t last_key(const MaskRule& rule, int64_t i, int64_t count) const {
        return columns.first_from(rule.last(rows(i), mask_shift), count);
    }
    // Positions for ALiBi, counted from the first key so that they are small numbers.
    int64_t alibi_row(int64_t i) const { return rows(i) + alibi_shift - first_column; }
    int64_t alibi_column(int64_t j) const { return columns(j) - first_column; }
};

}  // namespace
}  // namespace libflash::cpu
