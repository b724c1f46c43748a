// Replaces the library's header, with the fragment layouts that it describes.
#pragma once

#include "emulation.h"

namespace libflash::cuda {

inline void mma_m8n8k4(double (&c)[2], double a, double b) {
    using emulation::lane, emulation::shown_by;
    std::memcpy(&shown_by(lane())[0], &a, 8);
    std::memcpy(&shown_by(lane())[1], &b, 8);
    emulation::wait_for_warp();
    for (int e = 0; e < 2; ++e) {
        const int row = lane() / 4, col = lane() % 4 * 2 + e;
        for (int k = 0; k < 4; ++k) {
            double left, right;
            std::memcpy(&left, &shown_by(row * 4 + k)[0], 8);
            std::memcpy(&right, &shown_by(col * 4 + k)[1], 8);
            c[e] = std::fma(left, right, c[e]);
        }
    }
    emulation::wait_for_warp();
}

}  // namespace libflash::cuda
