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

// m16n8k8 and m16n8k16: kSteps times four columns of A.
template <int kSteps>
void mma_m16n8_of_steps(double* const (&c)[4], const double (&a)[2 * kSteps], const double (&b)[kSteps]) {
    struct Operands {
        double a[16][16], b[8][16];  // [row][k], [column][k]
    };
    static Operands of_warps[emulation::kMostResident * emulation::kMaxWarps];
    Operands& of_warp = of_warps[emulation::resident_thread() / 32];
    const int g = emulation::lane() / 4, t = emulation::lane() % 4;
    for (int i = 0; i < kSteps; ++i) {
        for (int h = 0; h < 2; ++h) of_warp.a[g + 8 * h][t + 4 * i] = a[2 * i + h];
        of_warp.b[g][t + 4 * i] = b[i];
    }
    emulation::wait_for_warp();
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 4 * kSteps; ++k) *c[e] = std::fma(of_warp.a[g + e / 2 * 8][k], of_warp.b[2 * t + e % 2][k], *c[e]);
    emulation::wait_for_warp();
}
inline void mma_m16n8(double& c0, double& c1, double& c2, double& c3, const double (&a)[4], const double (&b)[2]) {
    mma_m16n8_of_steps<2>({&c0, &c1, &c2, &c3}, a, b);
}
inline void mma_m16n8(double& c0, double& c1, double& c2, double& c3, const double (&a)[8], const double (&b)[4]) {
    mma_m16n8_of_steps<4>({&c0, &c1, &c2, &c3}, a, b);
}

}  // namespace libflash::cuda
