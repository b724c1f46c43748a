// The dropout mask: Philox4x32-7 of (seed, offset, batch, head, row, column), as defined in libflash.h. Internal linkage for
// the reason given in convert.h.
#pragma once

#include <cstdint>

#include "cpu/positions.h"

namespace libflash::cpu {
namespace {

struct PhiloxWords {
    uint32_t word[4];
};

inline PhiloxWords philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 7; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53u} * c0, product1 = uint64_t{0xCD9E8D57u} * c2;
        c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
        c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(product1);
        c3 = static_cast<uint32_t>(product0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// The dropout mask of one head of one sequence. factor() takes the indices of a row and a key in the call; `rows` and `columns`
// convert them to positions, on which the random words depend.
struct DropoutMask {
    uint32_t key0, key1, head, offset;
    uint32_t threshold;  // smaller random numbers drop an element
    double kept;         // factor of kept probabilities
    RowNumbers rows, columns;

    DropoutMask(const AttentionProblem& p, int64_t batch, int64_t query_head, const SequencePositions& positions)
        : key0(static_cast<uint32_t>(p.dropout.seed)), key1(static_cast<uint32_t>(p.dropout.seed >> 32)),
          head(head_number(p.dropout_numbers, batch, query_head)),
          offset(static_cast<uint32_t>(p.dropout.offset) ^ (static_cast<uint32_t>(p.dropout.offset >> 32) * 0x9E3779B9u)),
          threshold(p.dropout.threshold()), kept(p.dropout.keep_factor()), rows(positions.rows), columns(positions.columns) {}

    static uint32_t head_number(const DropoutNumbers& numbers, int64_t batch, int64_t query_head) {
        const auto sequence = static_cast<uint64_t>(numbers.sequences ? numbers.sequences[batch] : batch);
        return static_cast<uint32_t>(sequence * static_cast<uint64_t>(numbers.heads_total) +
                                     static_cast<uint64_t>(numbers.head_begin + query_head));
    }

    // 0 if dropped, else `kept`.
    double factor(int64_t row, int64_t column) const {
        const int64_t position = columns(column);
        const PhiloxWords words =
            philox4x32(static_cast<uint32_t>(position >> 3), static_cast<uint32_t>(rows(row)), head, offset, key0, key1);
        const uint32_t number = words.word[position >> 1 & 3] >> (position & 1) * 16 & 0xffff;
        return number >= threshold ? kept : 0.0;
    }
};

}  // namespace
}  // namespace libflash::cpu
