// Replaces the library's header.
#pragma once

#include "emulation.h"

namespace libflash::cuda {

inline uint32_t transpose_matrix(uint32_t pair) {
    struct Lane {
        uint32_t pair, transposed;
    } mine{pair, 0};
    emulation::in_warp(mine, [](const auto& lanes) {
        for (int i = 0; i < 64; ++i) {
            const int lane = i / 2, row = lane % 4 * 2 + i % 2, column = lane / 4;
            lanes(lane).transposed |= (lanes(row * 4 + column / 2).pair >> 16 * (column % 2) & 0xffff) << 16 * (i % 2);
        }
    });
    return mine.transposed;
}

}  // namespace libflash::cuda
