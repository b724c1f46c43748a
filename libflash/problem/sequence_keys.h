// Which keys the query rows of one sequence of a decode call see, and at which positions rows and keys stand. Reads lengths,
// positions and tree bits, so for host tensors only.
#pragma once

#include <cstdint>

#include "problem/decode.h"

namespace libflash {

class SequenceKeys {
public:
    // Keys [first, last).
    struct Range {
        int64_t first = 0, last = 0;
        bool empty() const { return first >= last; }
    };

    SequenceKeys(const DecodeProblem& problem, int64_t b)
        : length_k_(problem.length_k(b)), shift_(problem.shift(b)), pad_(problem.leftpad ? problem.leftpad[b] : 0),
          rule_(problem.mask_rule), window_(problem.window) {
        if (problem.positions) positions_ = problem.positions + problem.q_rows.before(b);
        if (problem.tree.data && problem.tree.rows.length(b) > 0) {
            row_step_ = problem.tree.stride[0], word_step_ = problem.tree.stride[1];
            bits_ = problem.tree.data + problem.tree.rows.before(b) * row_step_;
        } else if (problem.tree.data) {
            rule_.right = 0;  // a sequence without bits is causal
        }
        causal_ = problem.causal || problem.tree.data;
        has_gaps_ = bits_ || (positions_ && (window_.bounded() || problem.alibi_slopes.present));
    }

    // Whether a row may see only some keys of its range, or positions may differ from the numbers of keys.
    bool has_gaps() const { return has_gaps_; }

    // The keys of this range that sees() accepts are those that the row sees; without gaps it sees all of them.
    Range range(int64_t row) const {
        if (!has_gaps_) return clipped({rule_.first(row, shift_), rule_.last(row, shift_)});
        const int64_t place = position(row), last = place + window_.right + 1;
        const Range before = clipped({place - window_.left, last < shift_ ? last : shift_});
        const int64_t end = !bits_ && causal_ ? row + shift_ + 1 : length_k_;
        return clipped({before.empty() ? shift_ : before.first, end});
    }
    // Keys of range(row) before this one are all visible.
    int64_t first_gap(int64_t row) const {
        const int64_t last = position(row) + window_.right + 1;
        return last < shift_ ? last : shift_;
    }
    // For a key of range(row) of a sequence with gaps.
    bool sees(int64_t row, int64_t key) const {
        const int64_t distance = key_position(key) - position(row);
        if (distance < -window_.left || distance > window_.right) return false;
        return key < shift_ || !bits_ || bit(row, key - shift_);
    }

    // Of a query row and of a key, for the window and ALiBi.
    int64_t position(int64_t row) const { return positions_ ? positions_[row] : shift_ + row; }
    int64_t key_position(int64_t key) const { return positions_ && key >= shift_ ? positions_[key - shift_] : key; }

private:
    Range clipped(Range range) const {
        return {range.first > pad_ ? range.first : pad_, range.last < length_k_ ? range.last : length_k_};
    }
    bool bit(int64_t row, int64_t n) const {
        const auto word = static_cast<uint32_t>(bits_[row * row_step_ + n / 32 * word_step_]);
        return (word >> (n % 32)) & 1;
    }

    int64_t length_k_, shift_, pad_;
    MaskRule rule_, window_;
    const int32_t *positions_ = nullptr, *bits_ = nullptr;
    int64_t row_step_ = 0, word_step_ = 0;
    bool causal_ = false, has_gaps_ = false;
};

}  // namespace libflash
