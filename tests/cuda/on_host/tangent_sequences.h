// The sequences of the emulated tangents of sm90. A Case has `batch` and `lengths`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/host/tile_schedule.h"

namespace libflash::cuda {

enum class Lengths { dense, used, packed };

// The sequences of one side: first row of each in all rows, allocated and used lengths.
struct Side {
    std::vector<int32_t> start, owned, length, cu{0};
    int rows = 0;

    template <class Case>
    Side(const Case& c, int count, int less) {
        for (int b = 0; b < c.batch; ++b) {
            const int here = c.lengths == Lengths::packed && b > 0 ? count / (b + 1) - less : count;
            start.push_back(rows), owned.push_back(here);
            length.push_back(c.lengths == Lengths::used ? std::max(0, count - b * less) : here);
            cu.push_back(rows += here);
        }
    }
    template <class Case>
    LengthsParams params(const Case& c) const {
        if (c.lengths == Lengths::packed) return {cu.data(), nullptr, rows};
        return {nullptr, c.lengths == Lengths::used ? length.data() : nullptr, owned[0]};
    }
    template <class Case>
    Sequences sequences(const Case& c, int longest) const {
        Sequences side;
        side.capacity = c.lengths == Lengths::packed ? rows : owned[0], side.max_length = longest;
        side.cu = c.lengths == Lengths::packed ? cu.data() : nullptr;
        return side;
    }
};

}  // namespace libflash::cuda
