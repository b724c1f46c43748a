// Replaces the library's header, with the fragment layouts that it describes.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "emulation.h"

namespace libflash::cuda {

// Half `which` of a pair of 16-bit numbers.
template <class T>
float half_of(uint64_t pair, int which) {
    const uint16_t bits = static_cast<uint16_t>(pair >> 16 * which);
    T x;
    std::memcpy(&x, &bits, 2);
    return to_float(x);
}

// A lane's part of a left operand of 16 rows [row][k].
template <class T>
void store_fragment(float (&rows)[16][16], int lane, const uint32_t (&a)[4]) {
    const int row = lane / 4, k = lane % 4 * 2;
    for (int i = 0; i < 8; ++i) rows[row + i / 2 % 2 * 8][k + i / 4 * 8 + i % 2] = half_of<T>(a[i / 2], i % 2);
}

// Calls multiply(row, sums) with the 8 sums of a row of 16 in turn, kept in the lanes' `c`.
template <class Lanes, class Multiply>
void for_rows_of_sums(const Lanes& lanes, const Multiply& multiply) {
    for (int row = 0; row < 16; ++row) {
        float sums[8];
        const auto at = [&](int col) -> float& { return lanes(row % 8 * 4 + col / 2).c[row / 8 * 2 + col % 2]; };
        for (int col = 0; col < 8; ++col) sums[col] = at(col);
        multiply(row, sums);
        for (int col = 0; col < 8; ++col) at(col) = sums[col];
    }
}

// The sum is rounded once: on sm_90 it does not depend on the order of the 16 products.
template <class T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
    struct Lane {
        float (&c)[4];
        const uint32_t (&a)[4], b[2];
    } mine{c, a, {b0, b1}};
    emulation::in_warp(mine, [](const auto& lanes) {
        float left[16][16], right[16][8];  // [row][k], [k][column]
        for (int lane = 0; lane < 32; ++lane) {
            store_fragment<T>(left, lane, lanes(lane).a);
            for (int i = 0; i < 4; ++i)
                right[lane % 4 * 2 + i / 2 * 8 + i % 2][lane / 4] = half_of<T>(lanes(lane).b[i / 2], i % 2);
        }
        for_rows_of_sums(lanes, [&](int row, float (&c)[8]) {
            double sums[8];
            for (int col = 0; col < 8; ++col) sums[col] = c[col];
            for (int k = 0; k < 16; ++k)
                for (int col = 0; col < 8; ++col) sums[col] += double{left[row][k]} * right[k][col];
            for (int col = 0; col < 8; ++col) c[col] = static_cast<float>(sums[col]);
        });
    });
}

// A tf32 number: the last 13 bits are ignored.
inline float tf32_of(uint32_t register_bits) { return float_of(register_bits & 0xffffe000u); }

inline void mma_m16n8k8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Lane {
        float (&c)[4];
        const uint32_t (&a)[4], b[2];
    } mine{c, a, {b0, b1}};
    emulation::in_warp(mine, [](const auto& lanes) {
        float left[16][8], right[8][8];  // [row][k], [k][column]
        for (int lane = 0; lane < 32; ++lane) {
            const int row = lane / 4, k = lane % 4;
            for (int i = 0; i < 4; ++i) left[row + i % 2 * 8][k + i / 2 * 4] = tf32_of(lanes(lane).a[i]);
            for (int i = 0; i < 2; ++i) right[k + i * 4][row] = tf32_of(lanes(lane).b[i]);
        }
        for_rows_of_sums(lanes, [&](int row, float (&sums)[8]) {
            for (int k = 0; k < 8; ++k)
                for (int col = 0; col < 8; ++col) sums[col] += left[row][k] * right[k][col];
        });
    });
}

inline void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed) {
    struct Lane {
        uint32_t (&r)[4];
        uint32_t address;
    } mine{r, address};
    emulation::in_warp(mine, [=](const auto& lanes) {
        for (int m = 0; m < 4; ++m) {
            uint16_t rows[8][8];
            for (int row = 0; row < 8; ++row) std::memcpy(rows[row], shared_pointer(lanes(m * 8 + row).address), 16);
            for (int lane = 0; lane < 32; ++lane) {
                const int row = lane / 4, col = lane % 4 * 2;
                lanes(lane).r[m] = transposed ? uint32_t{rows[col + 1][row]} << 16 | rows[col][row]
                                              : uint32_t{rows[row][col + 1]} << 16 | rows[row][col];
            }
        }
    });
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, true); }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
    struct Lane {
        const uint32_t (&r)[4];
        uint32_t address;
    } mine{r, address};
    emulation::in_warp(mine, [](const auto& lanes) {
        for (int i = 0; i < 128; ++i) {
            const int m = i / 32, lane = i % 32;
            std::memcpy(shared_pointer(lanes(m * 8 + lane / 4).address) + lane % 4 * 4, &lanes(lane).r[m], 4);
        }
    });
}
#endif

}  // namespace libflash::cuda
