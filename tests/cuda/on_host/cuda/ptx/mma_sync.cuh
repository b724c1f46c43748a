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

// This lane's part of a left operand of 16 rows [row][k].
template <class T>
void store_fragment(float (&rows)[16][16], const uint32_t (&a)[4]) {
    const int row = emulation::lane() / 4, k = emulation::lane() % 4 * 2;
    for (int i = 0; i < 8; ++i) rows[row + i / 2 % 2 * 8][k + i / 4 * 8 + i % 2] = half_of<T>(a[i / 2], i % 2);
}

// The sum is rounded once: on sm_90 it does not depend on the order of the 16 products.
template <class T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
    struct Operands {
        float a[16][16], b[8][16];  // [row][k], [column][k]
    };
    static Operands of_warps[emulation::kMostResident * emulation::kMaxWarps];
    Operands& of_warp = of_warps[emulation::resident_thread() / 32];
    const int lane = emulation::lane();
    store_fragment<T>(of_warp.a, a);
    for (int i = 0; i < 4; ++i) of_warp.b[lane / 4][lane % 4 * 2 + i / 2 * 8 + i % 2] = half_of<T>(i < 2 ? b0 : b1, i % 2);
    emulation::wait_for_warp();
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + e / 2 * 8, col = lane % 4 * 2 + e % 2;
        double sum = c[e];
        for (int k = 0; k < 16; ++k) sum += double{of_warp.a[row][k]} * of_warp.b[col][k];
        c[e] = static_cast<float>(sum);
    }
    emulation::wait_for_warp();
}

// A tf32 number: the last 13 bits are ignored.
inline float tf32_of(uint64_t register_bits) { return float_of(static_cast<uint32_t>(register_bits) & 0xffffe000u); }

inline void mma_m16n8k8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    using emulation::lane, emulation::shown_by;
    auto& mine = shown_by(lane());
    for (int i = 0; i < 4; ++i) mine[i] = a[i];
    mine[4] = b0;
    mine[5] = b1;
    emulation::wait_for_warp();
    for (int e = 0; e < 4; ++e) {
        const int row = lane() / 4 + e / 2 * 8, col = lane() % 4 * 2 + e % 2;
        for (int k = 0; k < 8; ++k) {
            const float left = tf32_of(shown_by(row % 8 * 4 + k % 4)[row / 8 + k / 4 * 2]);
            c[e] += left * tf32_of(shown_by(col * 4 + k % 4)[4 + k / 4]);
        }
    }
    emulation::wait_for_warp();
}

inline void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed) {
    using emulation::lane, emulation::shown_by;
    shown_by(lane())[0] = address;
    emulation::wait_for_warp();
    for (int m = 0; m < 4; ++m) {
        r[m] = 0;
        for (int e = 0; e < 2; ++e) {
            const int across = lane() % 4 * 2 + e, row = transposed ? across : lane() / 4, col = transposed ? lane() / 4 : across;
            uint16_t x;
            std::memcpy(&x, shared_pointer(shown_by(m * 8 + row)[0]) + col * 2, 2);
            r[m] |= uint32_t{x} << 16 * e;
        }
    }
    emulation::wait_for_warp();
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, true); }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
    using emulation::lane, emulation::shown_by;
    shown_by(lane())[0] = address;
    emulation::wait_for_warp();
    for (int m = 0; m < 4; ++m) std::memcpy(shared_pointer(shown_by(m * 8 + lane() / 4)[0]) + lane() % 4 * 4, &r[m], 4);
    emulation::wait_for_warp();
}
#endif

}  // namespace libflash::cuda
