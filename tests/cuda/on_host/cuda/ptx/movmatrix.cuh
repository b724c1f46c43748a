// Replaces the library's header.
#pragma once

#include "emulation.h"

namespace libflash::cuda {

inline uint32_t transpose_matrix(uint32_t pair) {
    using emulation::lane, emulation::shown_by;
    shown_by(lane())[0] = pair;
    emulation::wait_for_warp();
    uint32_t transposed = 0;
    for (int e = 0; e < 2; ++e) {
        const int row = lane() % 4 * 2 + e, column = lane() / 4;
        transposed |= (shown_by(row * 4 + column / 2)[0] >> 16 * (column % 2) & 0xffff) << 16 * e;
    }
    emulation::wait_for_warp();
    return transposed;
}

}  // namespace libflash::cuda
