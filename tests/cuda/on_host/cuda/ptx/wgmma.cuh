// Replaces the library's header, with the layouts that it describes. A product is computed when it is issued or, in random order,
// only when it is waited for, so that operands that change too early show in the result.
#pragma once

#include "cuda/ptx/mma_sync.cuh"
#include "emulation.h"

namespace libflash::cuda {

void issue(std::function<void()> product);
void complete_products(size_t pending);  // all groups but the last `pending`

inline void wgmma_fence() {}
void wgmma_commit();
template <int kPending>
void wgmma_wait() {
    complete_products(kPending);
}
template <int kCount>
void wgmma_fence_operand(float (&)[kCount]) {}

// Reads 8 x 8 elements of an operand as they lie in memory: with contiguous k, (row + i, k) to (row + i, k + 7) for each i, or of
// a transposed one (row, k + i) to (row + 7, k + i).
inline void load_block(Halves (&x)[8], uint64_t descriptor, bool transposed, int row, int k) {
    const auto field = [&](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
    const uint32_t across = row / 64 * field(16) + k / 8 * field(32) + row % 64 * 2, along = row / 8 * field(32) + k * 2;
    for (int i = 0; i < 8; ++i) {
        const uint32_t at = field(0) + (transposed ? across : along) + i * 128;
        std::memcpy(&x[i], shared_pointer(at ^ (at >> 7 & 7) << 4), sizeof x[i]);
    }
}

template <class T, int kN>
struct Wgmma {
    // The operands of a warp as floats. The first lane that comes to a product reads shared memory, so the result shows it if no
    // barrier orders another lane's store before the product.
    struct Operands {
        double a[16][16];                  // [row][k]
        alignas(64) float b[16][kN + 16];  // [k][column]; rows of 1024 bytes would share few sets of the cache
    };
    static Operands& operands_of_warp() {
        static Operands of_warps[emulation::kMostResident * emulation::kMaxWarps];
        return of_warps[emulation::resident_thread() / 32];
    }
    struct Lane {
        float (&d)[kN / 2];
        const uint32_t (&a)[4];  // of multiply()
    };

    template <bool kTransposed>
    static void convert_a(double (&a)[16][16], uint64_t descriptor, int first_row) {
        for (int block = 0; block < 4; ++block) {
            const int row = block / 2 * 8, k = block % 2 * 8;
            Halves x[8];
            load_block(x, descriptor, kTransposed, first_row + row, k);
            if (kTransposed) transpose(x);
            for (int i = 0; i < 8; ++i) {
                const Floats of_row = to_floats(x[i], T());
                for (int j = 0; j < 8; ++j) a[row + i][k + j] = double{of_row[j]};
            }
        }
    }
    template <bool kTransposed>
    static void convert_b(float (&b)[16][kN + 16], uint64_t descriptor) {
        for (int block = 0; block < kN / 4; ++block) {
            const int col = block / 2 * 8, k = block % 2 * 8;
            Halves x[8];
            load_block(x, descriptor, kTransposed, col, k);
            if (!kTransposed) transpose(x);
            for (int i = 0; i < 8; ++i) {
                const Floats of_k = to_floats(x[i], T());
                std::memcpy(&b[k + i][col], &of_k, sizeof of_k);
            }
        }
    }
    // Calls visit(at, of_lane) for the place of every second sum [row][column] and those that a lane has of it and the next one.
    template <class Lanes, class Visit>
    static void for_pairs_of_sums(float (&sums)[16][kN], const Lanes& lanes, const Visit& visit) {
        for (int lane = 0; lane < 32; ++lane) {
            float* const d = lanes(lane).d;
            for (int i = 0; i < kN / 4; ++i) visit(&sums[lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2], d + 2 * i);
        }
    }
    // The sum is rounded once, as that of mma_m16n8k16.
    template <class Lanes>
    static void add(const Lanes& lanes, const Operands& operands, bool accumulate) {
        alignas(64) static float sums[16][kN];
        if (accumulate) {
            for_pairs_of_sums(sums, lanes, [](float* at, const float* of_lane) { std::memcpy(at, of_lane, 8); });
        } else {
            std::memset(sums, 0, sizeof sums);
        }
        add_product(sums[0], kN, operands.a, operands.b[0], kN + 16, kN);
        for_pairs_of_sums(sums, lanes, [](const float* at, float* of_lane) { std::memcpy(of_lane, at, 8); });
    }

    template <bool kTransposedB, bool kTransposedA = false>
    static void multiply_shared(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
        issue([=, &d] {
            const uint32_t none[4] = {};
            Lane mine{d, none};
            Operands& operands = operands_of_warp();
            if (emulation::is_first_of_warp()) {
                convert_a<kTransposedA>(operands.a, a, emulation::warp() % 4 * 16);
                convert_b<kTransposedB>(operands.b, b);
            }
            emulation::in_warp(mine, [&](const auto& lanes) { add(lanes, operands, accumulate); });
        });
    }

    template <bool kTransposedB>
    static void multiply(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
        issue([=, &d, &a] {
            Lane mine{d, a};
            Operands& operands = operands_of_warp();
            if (emulation::is_first_of_warp()) convert_b<kTransposedB>(operands.b, b);
            emulation::in_warp(mine, [&](const auto& lanes) {
                for (int lane = 0; lane < 32; ++lane) store_fragment<T>(operands.a, lane, lanes(lane).a);
                add(lanes, operands, accumulate);
            });
        });
    }
};

}  // namespace libflash::cuda
