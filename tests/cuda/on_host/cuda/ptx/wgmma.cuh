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

// Element (row, k) of an operand with contiguous k, or (k, column) of a transposed one.
template <class T>
__attribute__((always_inline)) inline float element_of(uint64_t descriptor, bool transposed, int row, int k) {
    const auto field = [&](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
    const uint32_t across = row / 64 * field(16) + k / 8 * field(32) + k % 8 * 128 + row % 64 * 2;
    const uint32_t along = row / 8 * field(32) + row % 8 * 128 + k * 2;
    const uint32_t at = field(0) + (transposed ? across : along);
    T x;
    std::memcpy(&x, shared_pointer(at ^ (at >> 7 & 7) << 4), 2);
    return to_float(x);
}

// The operands of a product of a warp as floats: its lanes convert a part each.
struct WarpOperands {
    float a[16][16];     // [row][k]
    float b[4][16][64];  // [lane % 4][k][column of these lanes]
};
inline WarpOperands& operands_of_warp() {
    static WarpOperands of_warps[emulation::kMostResident * emulation::kMaxWarps];
    return of_warps[emulation::resident_thread() / 32];
}

template <class T, int kN>
struct Wgmma {
    // The lane's part of `b`. Columns 8 n + 2 q and the one after it belong to the lanes whose number modulo 4 is q.
    template <bool kTransposedB>
    __attribute__((optimize("O3"))) static void convert(WarpOperands& of_warp, uint64_t b) {
        for (int i = emulation::lane(); i < kN * 16; i += 32) {
            const int col = i / 16, k = i % 16;
            of_warp.b[col / 2 % 4][k][col / 8 * 2 + col % 2] = element_of<T>(b, kTransposedB, col, k);
        }
    }
    // After all lanes have converted. The sum is rounded once, as that of mma_m16n8k16.
    __attribute__((optimize("O3"))) static void add(float (&d)[kN / 2], const WarpOperands& of_warp, int lane, bool accumulate) {
        for (int r = 0; r < 2; ++r) {
            double sums[kN / 4];
            for (int j = 0; j < kN / 4; ++j) sums[j] = accumulate ? d[j / 2 * 4 + r * 2 + j % 2] : 0.0f;
            for (int k = 0; k < 16; ++k) {
                const double left = of_warp.a[lane / 4 + r * 8][k];
                const float* right = of_warp.b[lane % 4][k];
                for (int j = 0; j < kN / 4; ++j) sums[j] += left * right[j];
            }
            for (int j = 0; j < kN / 4; ++j) d[j / 2 * 4 + r * 2 + j % 2] = static_cast<float>(sums[j]);
        }
    }
    template <bool kTransposedB>
    static void convert_and_add(float (&d)[kN / 2], WarpOperands& of_warp, uint64_t b, bool accumulate) {
        convert<kTransposedB>(of_warp, b);
        emulation::wait_for_warp();
        add(d, of_warp, emulation::lane(), accumulate);
        emulation::wait_for_warp();
    }

    template <bool kTransposedB, bool kTransposedA = false>
    static void multiply_shared(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
        issue([=, &d] {
            WarpOperands& of_warp = operands_of_warp();
            for (int i = emulation::lane(); i < 256; i += 32)
                of_warp.a[i / 16][i % 16] = element_of<T>(a, kTransposedA, emulation::warp() % 4 * 16 + i / 16, i % 16);
            convert_and_add<kTransposedB>(d, of_warp, b, accumulate);
        });
    }

    template <bool kTransposedB>
    static void multiply(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
        issue([=, &d, &a] {
            WarpOperands& of_warp = operands_of_warp();
            store_fragment<T>(of_warp.a, a);
            convert_and_add<kTransposedB>(d, of_warp, b, accumulate);
        });
    }
};

}  // namespace libflash::cuda
