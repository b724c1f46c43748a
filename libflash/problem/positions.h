// The positions of the rows of one side (queries or keys) in the whole sequence, of which the call may have a part.
#pragma once

#include <cstdint>

namespace libflash {

// Positions, and numbers of keys and of heads, are below this limit, so that their sums cannot overflow int64.
constexpr int64_t kPositionLimit = int64_t{1} << 40;

struct Positions {
    int64_t begin = 0, step = 1;      // row i of a sequence has position begin + i * step
    const int32_t* begins = nullptr;  // [batch], instead of begin
    // Instead of begin, step and begins, the position of each row: [row] of a packed tensor, or [batch, row] with `batch_stride`.
    const int32_t* of_rows = nullptr;
    int64_t batch_stride = 0;
};

// The numbers that dropout uses for a batch entry and a head.
struct DropoutNumbers {
    const int32_t* sequences = nullptr;  // [batch]; nullptr: 0, 1, ...
    int64_t head_begin = 0;
    int64_t heads_total = 0;  // heads_q unless the call has some of the heads

    bool given() const { return sequences || head_begin != 0; }
};

}  // namespace libflash
