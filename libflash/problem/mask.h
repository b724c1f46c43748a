// Causal rule and window in one form: which keys a query row sees because of their positions.
#pragma once

#include <cstdint>

namespace libflash {

struct MaskRule {
    // Larger than any length, and small enough that the sum of a few such values does not overflow.
    static constexpr int64_t kUnbounded = int64_t{1} << 48;

    int64_t left = kUnbounded;   // keys left of the diagonal that are visible
    int64_t right = kUnbounded;  // keys right of the diagonal; causal: 0
    bool top_left = false;       // the diagonal starts at (0, 0) instead of ending at (Lq - 1, Lk - 1)

    bool bounded() const { return left < kUnbounded || right < kUnbounded; }
    // Column of the diagonal in row 0.
    int64_t shift(int64_t length_q, int64_t length_k) const { return top_left ? 0 : length_k - length_q; }
    // `row` sees the keys [first, last), intersected with [0, length_k).
    int64_t first(int64_t row, int64_t shift) const { return row + shift - left; }
    int64_t last(int64_t row, int64_t shift) const { return row + shift + right + 1; }
};

}  // namespace libflash
