// Replaces the library's header, with the layouts that it describes. A product is computed when it is issued or, in disorder,
// only when it is waited for, so that operands that change too early show in the result.
#pragma once

#include "cuda/ptx/mma_sync.cuh"
#include "emulation.h"

namespace libflash::cuda {

// For each thread the groups of products that were issued and not yet waited for; the last group is open.
using Products = std::vector<std::function<void()>>;
inline std::vector<Products>& issued_products() {
    static std::vector<Products> of_threads[emulation::kMostResident * emulation::kMaxWarps * 32];
    std::vector<Products>& groups = of_threads[emulation::resident_thread()];
    if (groups.empty()) groups.emplace_back();
    return groups;
}
inline void issue(std::function<void()> product) {
    if (!emulation::machine.disorder) return product();
    issued_products().back().push_back(std::move(product));
}

inline void wgmma_fence() {}
inline void wgmma_commit() { issued_products().emplace_back(); }
template <int kPending>
void wgmma_wait() {
    std::vector<Products>& groups = issued_products();
    while (groups.size() > kPending + 1) {
        for (const auto& product : groups.front()) product();
        groups.erase(groups.begin());
    }
}
template <int kCount>
void wgmma_fence_operand(float (&)[kCount]) {}

// Reads eight elements of an operand with contiguous k, (row, k) to (row, k + 7), or of a transposed one, to (row + 7, k).
template <class T>
void eight_elements(float (&x)[8], uint64_t descriptor, bool transposed, int row, int k) {
    const auto field = [&](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
    const uint32_t across = row / 64 * field(16) + k / 8 * field(32) + k % 8 * 128 + row % 64 * 2;
    const uint32_t along = row / 8 * field(32) + row % 8 * 128 + k * 2;
    const uint32_t at = field(0) + (transposed ? across : along);
    T stored[8];
    std::memcpy(stored, shared_pointer(at ^ (at >> 7 & 7) << 4), sizeof stored);
    for (int i = 0; i < 8; ++i) x[i] = to_float(stored[i]);
}

// Calls store(row, k, x) for every element x of an operand of that many rows and 16 columns k.
template <class T, bool kTransposed, class Store>
void for_elements(uint64_t descriptor, int first_row, int rows, const Store& store) {
    for (int i = 0; i < rows * 2; ++i) {
        const int row = kTransposed ? i / 16 * 8 : i / 2, k = kTransposed ? i % 16 : i % 2 * 8;
        float x[8];
        eight_elements<T>(x, descriptor, kTransposed, first_row + row, k);
        for (int e = 0; e < 8; ++e) store(kTransposed ? row + e : row, kTransposed ? k : k + e, x[e]);
    }
}

template <class T, int kN>
struct Wgmma {
    // The operands of a warp as floats. The first lane that comes to a product reads shared memory, so the result shows it if no
    // barrier orders another lane's store before the product.
    struct Operands {
        float a[16][16], b[16][kN];  // [row][k], [k][column]
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
    static void convert_b(float (&b)[16][kN], uint64_t descriptor) {
        for_elements<T, kTransposed>(descriptor, 0, kN, [&](int col, int k, float x) { b[k][col] = x; });
    }
    // The sum is rounded once, as that of mma_m16n8k16.
    template <class Lanes>
    static void add(const Lanes& lanes, const Operands& operands, bool accumulate) {
        for (int row = 0; row < 16; ++row) {
            const auto at = [&](int col) -> float& {
                return lanes(row % 8 * 4 + col % 8 / 2).d[col / 8 * 4 + row / 8 * 2 + col % 2];
            };
            double sums[kN];
            for (int col = 0; col < kN; ++col) sums[col] = accumulate ? at(col) : 0.0f;
            for (int k = 0; k < 16; ++k) {
                const double left = operands.a[row][k];
                for (int col = 0; col < kN; ++col) sums[col] += left * operands.b[k][col];
            }
            for (int col = 0; col < kN; ++col) at(col) = static_cast<float>(sums[col]);
        }
    }

    template <bool kTransposedB, bool kTransposedA = false>
    static void multiply_shared(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
        issue([=, &d] {
            const uint32_t none[4] = {};
            Lane mine{d, none};
            Operands& operands = operands_of_warp();
            if (emulation::is_first_of_warp()) {
                for_elements<T, kTransposedA>(a, emulation::warp() % 4 * 16, 16,
                                              [&](int row, int k, float x) { operands.a[row][k] = x; });
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
