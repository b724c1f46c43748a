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
    return static_cast<float>(x);
}

template <class T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
    using emulation::lane, emulation::shown_by;
    auto& mine = shown_by(lane());
    for (int i = 0; i < 4; ++i) mine[i] = a[i];
    mine[4] = b0;
    mine[5] = b1;
    emulation::wait_for_warp();
    for (int e = 0; e < 4; ++e) {
        const int row = lane() / 4 + e / 2 * 8, col = lane() % 4 * 2 + e % 2;
        for (int k = 0; k < 16; ++k) {
            const float left = half_of<T>(shown_by(row % 8 * 4 + k % 8 / 2)[row / 8 + k / 8 * 2], k % 2);
            c[e] += left * half_of<T>(shown_by(col * 4 + k % 8 / 2)[4 + k / 8], k % 2);
        }
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

inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
    using emulation::lane, emulation::shown_by;
    shown_by(lane())[0] = address;
    emulation::wait_for_warp();
    for (int m = 0; m < 4; ++m) std::memcpy(shared_pointer(shown_by(m * 8 + lane() / 4)[0]) + lane() % 4 * 4, &r[m], 4);
    emulation::wait_for_warp();
}

}  // namespace libflash::cuda
