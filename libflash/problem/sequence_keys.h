// Which keys the query rows of one sequence of a decode call see, and the positions of rows and keys. Reads lengths, positions
// and tree bits, so it is for host tensors only. In the public functions a key is identified by its row in the cache of the call;
// if the cache has a shard of the keys, this row is not the number of the key in the sequence.
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
          rule_(problem.mask_rule), window_(problem.window), shard_(problem.shard) {
        if (problem.positions) positions_ = problem.positions + problem.q_rows.before(b);
        if (problem.tree.data && problem.tree.rows.length(b) > 0) {
            row_step_ = problem.tree.stride[0], word_step_ = problem.tree.stride[1];
            bits_ = problem.tree.data + problem.tree.rows.before(b) * row_step_;
        } else if (problem.tree.data) {
            rule_.right = 0;  // a sequence without bits is causal
        }
        causal_ = problem.causal || problem.tree.data;
        has_gaps_ = bits_ || (positions_ && (window_.bounded() || problem.alibi_slopes.present)) ||
                    (!shard_.whole() && problem.alibi_slopes.present);
    }

    // Whether a row may see only some keys of its range, or positions may differ from the numbers of keys.
    bool has_gaps() const { return has_gaps_; }

    // The range that contains all keys that the row sees. Without gaps the row sees all keys of the range, otherwise those for
    // which sees() is true.
    Range range(int64_t row) const {
        const Range numbers = range_of_numbers(row);
        return {shard_.row_of(numbers.first), shard_.row_of(numbers.last)};
    }
    // The row sees all keys of range(row) before this key.
    int64_t first_gap(int64_t row) const {
        const int64_t last = position(row) + window_.right + 1, gap = last < shift_ ? last : shift_;
        return gap > 0 ? shard_.row_of(gap) : 0;
    }
    // Whether the row sees a key of range(row), in a sequence with gaps.
    bool sees(int64_t row, int64_t key) const {
        const int64_t distance = key_position(key) - position(row);
        if (distance < -window_.left || distance > window_.right) return false;
        const int64_t n = shard_.key_of(key) - shift_;  // among the last Lq keys, if it is not negative
        return n < 0 || !bits_ || bit(row, n);
    }

    // The position of a query row and of a key, for the window and ALiBi.
    int64_t position(int64_t row) const { return positions_ ? positions_[row] : shift_ + row; }
    int64_t key_position(int64_t key) const {
        const int64_t number = shard_.key_of(key);
        return positions_ && number >= shift_ ? positions_[number - shift_] : number;
    }

private:
    // range() with the numbers of keys in the sequence, which are not negative.
    Range range_of_numbers(int64_t row) const {
        if (!has_gaps_) return clipped({rule_.first(row, shift_), rule_.last(row, shift_)});
        const int64_t at = position(row), last = at + window_.right + 1;
        const Range before = clipped({at - window_.left, last < shift_ ? last : shift_});
        const int64_t end = !bits_ && causal_ ? row + shift_ + 1 : length_k_;
        return clipped({before.empty() ? shift_ : before.first, end});
    }
    Range clipped(Range range) const {
        const int64_t last = range.last < length_k_ ? range.last : length_k_;
        return {range.first > pad_ ? range.first : pad_, last > 0 ? last : 0};
    }
    bool bit(int64_t row, int64_t n) const {
        const auto word = static_cast<uint32_t>(bits_[row * row_step_ + n / 32 * word_step_]);
        return (word >> (n % 32)) & 1;
    }

    int64_t length_k_, shift_, pad_;
    MaskRule rule_, window_;
    CacheShard shard_;
    const int32_t *positions_ = nullptr, *bits_ = nullptr;
    int64_t row_step_ = 0, word_step_ = 0;
    bool causal_ = false, has_gaps_ = false;
};

}  // namespace libflash
