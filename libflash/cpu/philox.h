// The dropout mask: Philox4x32-10 of (seed, offset, batch, head, row, column), as defined in libflash.h. Internal linkage for
// the reason given in convert.h.
#pragma once

#include <cstdint>

#include "problem/attention.h"

namespace libflash::cpu {
namespace {

struct PhiloxWords {
    uint32_t word[4];
};

inline PhiloxWords philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
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

// The dropout mask of one head of one sequence.
struct DropoutMask {
    uint32_t key0, key1, head, offset;
    uint64_t threshold;  // up to 2^32
    double kept;         // factor of kept probabilities, 1 / (1 - p)

    DropoutMask(const Dropout& dropout, int64_t heads_q, int64_t batch, int64_t query_head)
        : key0(static_cast<uint32_t>(dropout.seed)), key1(static_cast<uint32_t>(dropout.seed >> 32)),
          head(static_cast<uint32_t>(batch * heads_q + query_head)),
          offset(static_cast<uint32_t>(dropout.offset) ^ (static_cast<uint32_t>(dropout.offset >> 32) * 0x9E3779B9u)),
          threshold(static_cast<uint64_t>(dropout.p * 4294967296.0)), kept(1.0 / (1.0 - dropout.p)) {}

    // The random words of columns 4 * quad to 4 * quad + 3.
    PhiloxWords words(int64_t row, int64_t quad) const {
        return philox4x32(static_cast<uint32_t>(quad), static_cast<uint32_t>(row), head, offset, key0, key1);
    }
    // 0 if dropped, else `kept`.
    double factor(int64_t row, int64_t column) const {
        return words(row, column >> 2).word[column & 3] >= threshold ? kept : 0.0;
    }
};

}  // namespace
}  // namespace libflash::cpu
