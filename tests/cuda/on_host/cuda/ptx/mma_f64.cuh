// Replaces the library's header, with the fragment layouts that it describes.
#pragma once

#include "emulation.h"

namespace libflash::cuda {

// kRows x 8 sums of kSteps times four products, in the order of k.
template <int kRows, int kSteps>
void mma_of_doubles(double* const (&c)[kRows / 4], const double* a, const double* b) {
    constexpr int kHalves = kRows / 8;
    struct Lane {
        double* const (&c)[kRows / 4];
        const double *a, *b;  // kHalves * kSteps numbers, kSteps numbers
    } mine{c, a, b};
    emulation::in_warp(mine, [](const auto& lanes) {
        double left[kRows][4 * kSteps], right[4 * kSteps][8];
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < kSteps; ++i) {
                for (int h = 0; h < kHalves; ++h) left[lane / 4 + 8 * h][lane % 4 + 4 * i] = lanes(lane).a[kHalves * i + h];
                right[lane % 4 + 4 * i][lane / 4] = lanes(lane).b[i];
            }
        for (int row = 0; row < kRows; ++row) {
            double* sums[8];
            double sum[8];
            for (int col = 0; col < 8; ++col) sums[col] = lanes(row % 8 * 4 + col / 2).c[row / 8 * 2 + col % 2];
            for (int col = 0; col < 8; ++col) sum[col] = *sums[col];
            for (int k = 0; k < 4 * kSteps; ++k)
                for (int col = 0; col < 8; ++col) sum[col] = std::fma(left[row][k], right[k][col], sum[col]);
            for (int col = 0; col < 8; ++col) *sums[col] = sum[col];
        }
    });
}

inline void mma_m8n8k4(double (&c)[2], double a, double b) { mma_of_doubles<8, 1>({&c[0], &c[1]}, &a, &b); }
inline void mma_m16n8(double& c0, double& c1, double& c2, double& c3, const double (&a)[4], const double (&b)[2]) {
    mma_of_doubles<16, 2>({&c0, &c1, &c2, &c3}, a, b);
}
inline void mma_m16n8(double& c0, double& c1, double& c2, double& c3, const double (&a)[8], const double (&b)[4]) {
    mma_of_doubles<16, 4>({&c0, &c1, &c2, &c3}, a, b);
}

}  // namespace libflash::cuda
