// Matrix products whose weights (probabilities or score gradients) are 0 where a key is hidden. There even 0 * NaN must add
// nothing: a hidden key must not affect a row. Only tiles with hidden keys are checked, and only those whose values hold a NaN
// or an infinity use the slow loop.
#pragma once

#include "cpu/engine/gemm.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

enum class Weights { a, b };  // the operand that holds the weights; the other holds the values

template <class E>
FLASH_INLINE bool finite(E x) {
    return x - x == 0;  // NOLINT(misc-redundant-expression): infinity and NaN give NaN
}
#if FLASH_BF16_DOT
FLASH_INLINE float half_of_pair(Pair pair, int which) {
    const uint32_t bits = which ? pair.bits & 0xffff0000u : pair.bits << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
FLASH_INLINE bool finite(Pair x) { return finite(half_of_pair(x, 0)) && finite(half_of_pair(x, 1)); }
#endif

// Checks `rows` rows of `count` contiguous values.
template <class E>
static bool all_finite(const E* values, int64_t stride, int64_t rows, int64_t count) {
    for (int64_t k = 0; k < rows; ++k) {
        bool good = true;
        for (int64_t i = 0; i < count; ++i) good &= finite(values[k * stride + i]);
        if (!good) return false;
    }
    return true;
}

template <class E>
FLASH_INLINE E add_if_nonzero(E sum, E weight, E value) {
    return weight == 0 ? sum : sum + weight * value;
}
#if FLASH_BF16_DOT
FLASH_INLINE float add_if_nonzero(float sum, Pair weight, Pair value) {
    for (int which = 0; which < 2; ++which) sum = add_if_nonzero(sum, half_of_pair(weight, which), half_of_pair(value, which));
    return sum;
}
#endif

template <Weights kWeights, class E>
static void multiply_skipping_zeros(const Product<E>& p) {
    for (int64_t m = 0; m < p.m; ++m)
        for (int64_t n = 0; n < p.n; ++n) {
            Accumulator<E>& c = p.c[m * p.c_m + n];
            Accumulator<E> sum = 0;
            for (int64_t k = 0; k < p.k; ++k) {
                const E a = p.a[m * p.a_m + k * p.a_k], b = p.b[k * p.b_k + n];
                sum = kWeights == Weights::a ? add_if_nonzero(sum, a, b) : add_if_nonzero(sum, b, a);
            }
            c = p.start == Start::zero ? sum : p.start == Start::add ? c + sum : c * p.factors[n] + sum;
        }
}

// multiply() for a tile in which keys may be hidden (`hides`). If the values are in A, a_m must be 1.
template <Weights kWeights, class E>
static void multiply_masked(const Product<E>& p, bool hides) {
    if (hides) {
        const bool good = kWeights == Weights::a ? all_finite(p.b, p.b_k, p.k, p.n) : all_finite(p.a, p.a_k, p.k, p.m);
        if (!good) return multiply_skipping_zeros<kWeights>(p);
    }
    multiply(p);
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
