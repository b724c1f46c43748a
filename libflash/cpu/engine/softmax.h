// The online softmax over a tile of scores [key][lane]: row maximum and row sum of each lane, probabilities relative to the row
// maximum. The maximum is subtracted before the scale is applied, so the exponent of the largest score is exactly 0. A row
// maximum of -infinity (no visible key so far) is kept; only the subtraction uses 0 instead.
#pragma once

#include "cpu/engine/exp.h"
#include "cpu/engine/lanes.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

template <class A>
struct SoftmaxState {
    A *row_max = nullptr, *row_sum = nullptr;
    A* rescale = nullptr;  // the factor by which sums of earlier tiles must be multiplied after the latest tile
    // For the entropy, else nullptr: the sum of x 2^x, where the terms of row_sum are 2^x.
    A* exponent_sum = nullptr;

    void lay_out(Arena& arena, bool entropy = false) {
        row_max = arena.allocate<A>(kQueryTileRows);
        row_sum = arena.allocate<A>(kQueryTileRows);
        rescale = arena.allocate<A>(kQueryTileRows);
        if (entropy) exponent_sum = arena.allocate<A>(kQueryTileRows);
    }
    void start(int64_t width) {
        for (int64_t i = 0; i < width; ++i) row_max[i] = -kInfinity<A>, row_sum[i] = 0;
        for (int64_t i = 0; i < width && exponent_sum; ++i) exponent_sum[i] = 0;
    }
};

template <class A>
FLASH_INLINE Vec<A> largest_of_lane(const A* scores, int64_t width, int64_t count, Vec<A> start) {
    Vec<A> a = start, b = start, c = start, d = start;
    int64_t j = 0;
    for (; j + 4 <= count; j += 4, scores += 4 * width) {
        a = maximum_of_numbers(load(scores), a);
        b = maximum_of_numbers(load(scores + width), b);
        c = maximum_of_numbers(load(scores + 2 * width), c);
        d = maximum_of_numbers(load(scores + 3 * width), d);
    }
    for (; j < count; ++j, scores += width) a = maximum_of_numbers(load(scores), a);
    return maximum_of_numbers(maximum_of_numbers(a, b), maximum_of_numbers(c, d));
}

// Replaces -infinity by 0.
template <class A>
FLASH_INLINE Vec<A> finite_maximum(Vec<A> m) {
    return m == -kInfinity<A> ? Vec<A>{} : m;
}

// A lower bound for exponents x that are multiplied by 2^x or by a sum: 2^x is 0 there, and the product is 0. With an x of
// -infinity the product would be NaN.
template <class A>
constexpr A kLeastExponent = -4096;

template <class A>
FLASH_INLINE Vec<A> finite_exponent(Vec<A> x) {
    return maximum(x, broadcast<A>(kLeastExponent<A>));
}

// The exponent sum after the row maximum, which the exponents are relative to, has risen: each x becomes x + change.
template <class A>
FLASH_INLINE Vec<A> moved_exponent_sum(Vec<A> exponent_sum, Vec<A> row_sum, Vec<A> change) {
    return multiply_add(finite_exponent<A>(change), row_sum, exponent_sum);
}

#if FLASH_BF16_DOT
// Rounds two vectors to pairs of bf16, `low` in the low halves.
FLASH_INLINE U32 make_pairs(F32 low, F32 high) {
    const U32 rounded = round_to_pairs(low, high);
#if defined(__AVX512BF16__)
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                           4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (U32)_mm512_permutexvar_epi16(order, (__m512i)rounded);
#else
    const uint16x8_t both = vreinterpretq_u16_u32(rounded);
    return vreinterpretq_u32_u16(vzip1q_u16(both, vextq_u16(both, both, 4)));
#endif
}
#endif

// to[key / 2][lane] from tile[key][lane]; a missing last key is 0. Without pairs it does nothing: `to` is `tile`.
template <class T>
static void pack_probabilities(const Acc<T>* tile, int64_t count, int64_t width, Element<T>* to) {
#if FLASH_BF16_DOT
    if constexpr (kPaired<T>)
        for (int64_t j = 0; j < count; j += 2)
            for (int64_t i = 0; i < width; i += kLanes<float>) {
                const float* at = tile + j * width + i;
                store(&to[j / 2 * width + i].bits, make_pairs(load(at), j + 1 < count ? load(at + width) : F32{}));
            }
#else
    (void)tile, (void)count, (void)width, (void)to;
#endif
}

// Updates the state with a tile. unit: see score_unit(). Writes the probabilities to `p` as elements of a product; with kInPlace
// they overwrite the scores, because dropout is applied before they are packed. kEntropy: the exponent sum too.
template <class T, bool kInPlace, bool kEntropy = false>
static void softmax_tile(SoftmaxState<Acc<T>>& state, Acc<T>* scores, int64_t count, int64_t width, Acc<T> unit, Element<T>* p) {
    using A = Acc<T>;
    for (int64_t i = 0; i < width; i += kLanes<A>) {
        A* at = scores + i;
        const Vec<A> old_max = load(state.row_max + i), factor = broadcast(unit);
        const Vec<A> new_max = largest_of_lane<A>(at, width, count, old_max), shift = finite_maximum<A>(new_max);
        const Vec<A> change = (old_max - shift) * factor, rescale = exp2<A>(change);
        Vec<A> sum{};  // same order as the product with V: if all values are 1, the output is exactly 1
        Vec<A> exponents{};
        int64_t j = 0;
        for (; j + 2 <= count; j += 2, at += 2 * width) {
            const Vec<A> x0 = (load(at) - shift) * factor, x1 = (load(at + width) - shift) * factor;
            const Vec<A> p0 = exp2<A>(x0), p1 = exp2<A>(x1);
            sum += p0;
            sum += p1;
            if constexpr (kEntropy) {
                exponents = multiply_add(p0, finite_exponent<A>(x0), exponents);
                exponents = multiply_add(p1, finite_exponent<A>(x1), exponents);
            }
#if FLASH_BF16_DOT
            if constexpr (kPaired<T> && !kInPlace) {
                store(&p[j / 2 * width + i].bits, make_pairs(p0, p1));
                continue;
            }
#endif
            store(at, p0);
            store(at + width, p1);
        }
        if (j < count) {
            const Vec<A> x0 = (load(at) - shift) * factor, p0 = exp2<A>(x0);
            sum += p0;
            if constexpr (kEntropy) exponents = multiply_add(p0, finite_exponent<A>(x0), exponents);
            store(at, p0);
#if FLASH_BF16_DOT
            if constexpr (kPaired<T> && !kInPlace) store(&p[j / 2 * width + i].bits, make_pairs(p0, F32{}));
#endif
        }
        if constexpr (kEntropy) {
            const Vec<A> earlier = moved_exponent_sum<A>(load(state.exponent_sum + i), load(state.row_sum + i), change);
            store(state.exponent_sum + i, multiply_add(earlier, rescale, exponents));
        }
        store(state.row_max + i, new_max);
        store(state.row_sum + i, multiply_add(load(state.row_sum + i), rescale, sum));
        store(state.rescale + i, rescale);
    }
    (void)p;
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
