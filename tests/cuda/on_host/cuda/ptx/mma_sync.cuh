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

// Adds a product to sums [row][column], all of 16 rows: a[row][k] times b[k][column]. Each sum is rounded once. The columns are a
// multiple of 8; the strides are those of the rows of sums and of b.
void add_product(float* sums, int stride, const double (&a)[16][16], const float* b, int stride_b, int columns);

// Eight columns of a row.
using Floats = float __attribute__((vector_size(32)));
inline Floats eight_floats(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// Eight numbers of 16 bits.
using Halves = uint16_t __attribute__((vector_size(16)));
inline Floats to_floats(Halves x, __nv_bfloat16) {
    using Words = uint32_t __attribute__((vector_size(32)));
    return reinterpret_cast<Floats>(__builtin_convertvector(x, Words) << 16);
}
inline Floats to_floats(Halves x, __half) {
#ifdef __F16C__
    return _mm256_cvtph_ps(reinterpret_cast<__m128i>(x));
#else
    float y[8];
    for (int i = 0; i < 8; ++i) y[i] = to_float(__half(__half_raw{x[i]}));
    return eight_floats(y);
#endif
}
// 8 x 8 numbers. Each step moves the number of a row by one bit, from the first bit of a place to the last one.
__attribute__((always_inline)) inline void transpose(Halves (&x)[8]) {
    for (int step = 0; step < 3; ++step) {
        Halves y[8];
        for (int i = 0; i < 4; ++i) {
            y[2 * i] = __builtin_shuffle(x[i], x[i + 4], Halves{0, 8, 1, 9, 2, 10, 3, 11});
            y[2 * i + 1] = __builtin_shuffle(x[i], x[i + 4], Halves{4, 12, 5, 13, 6, 14, 7, 15});
        }
        for (int i = 0; i < 8; ++i) x[i] = y[i];
    }
}

// A lane's part of a left operand of 16 rows [row][k].
template <class T, class Number>
void store_fragment(Number (&rows)[16][16], int lane, const uint32_t (&a)[4]) {
    const int row = lane / 4, k = lane % 4 * 2;
    for (int i = 0; i < 8; ++i) rows[row + i / 2 % 2 * 8][k + i / 4 * 8 + i % 2] = half_of<T>(a[i / 2], i % 2);
}

// Sums of 16 rows and 8 columns, from and to the lanes' `c`.
template <class Lanes>
void load_sums(float (&sums)[16][8], const Lanes& lanes) {
    for (int i = 0; i < 64; ++i) std::memcpy(&sums[i / 32 * 8 + i % 32 / 4][i % 4 * 2], &lanes(i % 32).c[i / 32 * 2], 8);
}
template <class Lanes>
void store_sums(const float (&sums)[16][8], const Lanes& lanes) {
    for (int i = 0; i < 64; ++i) std::memcpy(&lanes(i % 32).c[i / 32 * 2], &sums[i / 32 * 8 + i % 32 / 4][i % 4 * 2], 8);
}

// The sum is rounded once: on sm_90 it does not depend on the order of the 16 products.
template <class T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
    struct Lane {
        float (&c)[4];
        const uint32_t (&a)[4], b[2];
    } mine{c, a, {b0, b1}};
    emulation::in_warp(mine, [](const auto& lanes) {
        double left[16][16];                          // [row][k]
        alignas(64) float right[16][8], sums[16][8];  // [k][column], [row][column]
        for (int lane = 0; lane < 32; ++lane) {
            store_fragment<T>(left, lane, lanes(lane).a);
            for (int i = 0; i < 4; ++i)
                right[lane % 4 * 2 + i / 2 * 8 + i % 2][lane / 4] = half_of<T>(lanes(lane).b[i / 2], i % 2);
        }
        load_sums(sums, lanes);
        add_product(sums[0], 8, left, right[0], 8, 8);
        store_sums(sums, lanes);
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
        alignas(32) float left[16][8], right[8][8], sums[16][8];  // [row][k], [k][column], [row][column]
        for (int lane = 0; lane < 32; ++lane) {
            const int row = lane / 4, k = lane % 4;
            for (int i = 0; i < 4; ++i) left[row + i % 2 * 8][k + i / 2 * 4] = tf32_of(lanes(lane).a[i]);
            for (int i = 0; i < 2; ++i) right[k + i * 4][row] = tf32_of(lanes(lane).b[i]);
        }
        load_sums(sums, lanes);
        for (int row = 0; row < 16; ++row) {
            Floats sum = eight_floats(sums[row]);
            for (int k = 0; k < 8; ++k) sum += left[row][k] * eight_floats(right[k]);
            std::memcpy(sums[row], &sum, sizeof sum);
        }
        store_sums(sums, lanes);
    });
}

template <bool kTransposed>
void load_matrices(uint32_t (&r)[4], uint32_t address) {
    struct Lane {
        uint32_t (&r)[4];
        uint32_t address;
    } mine{r, address};
    emulation::in_warp(mine, [](const auto& lanes) {
        for (int m = 0; m < 4; ++m) {
            Halves rows[8];
            for (int row = 0; row < 8; ++row) std::memcpy(&rows[row], shared_pointer(lanes(m * 8 + row).address), 16);
            if (kTransposed) transpose(rows);
            uint32_t pairs[32];
            std::memcpy(pairs, rows, sizeof pairs);
            for (int lane = 0; lane < 32; ++lane) lanes(lane).r[m] = pairs[lane];
        }
    });
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrices<false>(r, address); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { load_matrices<true>(r, address); }

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
