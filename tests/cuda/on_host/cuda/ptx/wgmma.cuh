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
float element_of(uint64_t descriptor, bool transposed, int row, int k) {
    const auto field = [&](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
    const uint32_t across = row / 64 * field(16) + k / 8 * field(32) + k % 8 * 128 + row % 64 * 2;
    const uint32_t along = row / 8 * field(32) + row % 8 * 128 + k * 2;
    const uint32_t place = field(0) + (transposed ? across : along);
    T x;
    std::memcpy(&x, shared_pointer(place ^ (place >> 7 & 7) << 4), 2);
    return static_cast<float>(x);
}

template <class T, int kN>
struct Wgmma {
    // left(r, k): element k of row r of this thread's two rows.
    template <bool kTransposedB, class Left>
    static void add(float (&d)[kN / 2], const Left& left, uint64_t b, bool accumulate) {
        for (int i = 0; i < kN / 2; ++i) {
            const int col = i / 4 * 8 + emulation::lane() % 4 * 2 + i % 2;
            float sum = accumulate ? d[i] : 0.0f;
            for (int k = 0; k < 16; ++k) sum += left(i / 2 % 2, k) * element_of<T>(b, kTransposedB, col, k);
            d[i] = sum;
        }
    }

    template <bool kTransposedB, bool kTransposedA = false>
    static void multiply_shared(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
        issue([=, &d] {
            const int first_row = emulation::warp() % 4 * 16 + emulation::lane() / 4;
            float rows[2][16];
            for (int r = 0; r < 2; ++r)
                for (int k = 0; k < 16; ++k) rows[r][k] = element_of<T>(a, kTransposedA, first_row + r * 8, k);
            add<kTransposedB>(d, [&](int r, int k) { return rows[r][k]; }, b, accumulate);
            emulation::wait_for_warp();
        });
    }

    template <bool kTransposedB>
    static void multiply(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
        issue([=, &d, &a] {
            using emulation::lane, emulation::shown_by;
            for (int i = 0; i < 4; ++i) shown_by(lane())[i] = a[i];
            emulation::wait_for_warp();
            float rows[2][16];
            for (int r = 0; r < 2; ++r)
                for (int k = 0; k < 16; ++k) rows[r][k] = half_of<T>(shown_by(lane() / 4 * 4 + k % 8 / 2)[r + k / 8 * 2], k % 2);
            add<kTransposedB>(d, [&](int r, int k) { return rows[r][k]; }, b, accumulate);
            emulation::wait_for_warp();
        });
    }
};

}  // namespace libflash::cuda
