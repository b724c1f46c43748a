// Decode with vectors along the channels: products of a few rows with keys and values.
#pragma once

#include "cpu/engine/small_q_elements.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// Calls step(RowCount<n>, first row) for blocks of 4, 2 and 1 rows.
template <int Count>
struct RowCount {
    static constexpr int value = Count;
};
template <class Step>
FLASH_INLINE void for_row_blocks(int64_t rows, const Step& step) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) step(RowCount<4>(), r);
    if (r + 2 <= rows) step(RowCount<2>(), r), r += 2;
    if (r < rows) step(RowCount<1>(), r);
}

// Returns the sum of the lanes of v[n] in lane n.
template <class A, int Step = kLanes<A> / 2>
FLASH_INLINE Vec<A> sum_each(Vec<A> (&v)[kLanes<A>]) {
    if constexpr (Step > 0) {
        FLASH_UNROLL
        for (int i = 0; i < Step; ++i) {
            exchange<A, Step>(v[i], v[i + Step], typename CountTo<kLanes<A>>::type{});
            v[i] += v[i + Step];
        }
        return sum_each<A, Step / 2>(v);
    }
    return v[0];
}

// scores[r][j] = q_r . k_j for `Count` rows and as many keys as a vector has lanes. Each load of q is used for four keys, or for
// two where the sums of four keys would not fit the registers. Scores from key `count` on are undefined.
template <int Count, class T, class C>
static void small_q_products(const C* const* k, int64_t head, int64_t count, int64_t channels, const SmallQElement<T>* q,
                             int64_t q_stride, Acc<T>* scores, int64_t scores_stride) {
    using A = Acc<T>;
    constexpr int L = kLanes<A>, S = kStepChannels<T>, kFit = 4 * Count > kVectorRegisters / 2 ? 2 : 4;
    constexpr int Keys = L < kFit ? L : kFit;
    Vec<A> sums[Count][L];
    for (int j = 0; j < L; j += Keys) {
        const C* row[Keys];
        for (int n = 0; n < Keys; ++n) row[n] = k[j + n < count ? j + n : count - 1] + head;
        Vec<A> sum[Count][Keys] = {};
        const auto step = [&](int64_t c, auto load_row) __attribute__((always_inline)) {
            decltype(load_row(row[0])) x[Keys];
            FLASH_UNROLL
            for (int n = 0; n < Keys; ++n) x[n] = load_row(row[n] + c);
            FLASH_UNROLL
            for (int r = 0; r < Count; ++r) {
                const auto y = load_channels(q + r * q_stride + c);
                FLASH_UNROLL
                for (int n = 0; n < Keys; ++n) sum[r][n] = dot_step(x[n], y, sum[r][n]);
            }
        };
        int64_t c = 0;
        if constexpr (kHasCodeTables<C>) {
            for (; c + kCodesAtOnce <= channels; c += kCodesAtOnce) {
                FLASH_UNROLL
                for (int n = 0; n < Keys; ++n) {
                    constexpr int kSteps = kCodesAtOnce / S;
                    decltype(load_channels(q)) x[kSteps];
                    load_codes(row[n] + c, x);
                    FLASH_UNROLL
                    for (int r = 0; r < Count; ++r) {
                        FLASH_UNROLL
                        for (int i = 0; i < kSteps; ++i)
                            sum[r][n] = dot_step(x[i], load_channels(q + r * q_stride + c + i * S), sum[r][n]);
                    }
                }
            }
        }
        for (; c + S <= channels; c += S) step(c, [](const C* p) __attribute__((always_inline)) { return load_key<T>(p); });
        if (c < channels)
            step(c, [left = channels - c](const C* p) __attribute__((always_inline)) { return load_key<T>(p, left); });
        FLASH_UNROLL
        for (int r = 0; r < Count; ++r) {
            FLASH_UNROLL
            for (int n = 0; n < Keys; ++n) sums[r][j + n] = sum[r][n];
        }
    }
    FLASH_UNROLL
    for (int r = 0; r < Count; ++r) store(scores + r * scores_stride, sum_each<A>(sums[r]));
}

// o[r][c] += sum_j p[r][j] v_j[c] for `Count` rows and `Vectors` vectors of channels.
template <int Count, int Vectors, class T, class C>
FLASH_INLINE void small_q_output_block(const C* const* v, int64_t head, int64_t count, int64_t c, int64_t channels,
                                       const Acc<T>* p, int64_t p_stride, Acc<T>* o, int64_t o_stride) {
    using A = Acc<T>;
    constexpr int L = kLanes<A>;
    Vec<A> sum[Count][Vectors];
    FLASH_UNROLL
    for (int r = 0; r < Count; ++r) {
        FLASH_UNROLL
        for (int n = 0; n < Vectors; ++n) sum[r][n] = Vec<A>{};
    }
    for (int64_t j = 0; j < count; ++j) {
        const C* row = v[j] + head + c;
        Vec<A> x[Vectors];
        if constexpr (kHasCodeTables<C> && Vectors > 1) {
            FLASH_UNROLL
            for (int n = 0; n < Vectors; n += kCodesAtOnce / L) load_codes(row + n * L, x + n);
        } else {
            FLASH_UNROLL
            for (int n = 0; n < Vectors; ++n)
                x[n] = Vectors == 1 ? load_cached_part<A>(row, channels - c) : load_cached<A>(row + n * L);
        }
        FLASH_UNROLL
        for (int r = 0; r < Count; ++r) {
            const Vec<A> weight = broadcast(p[r * p_stride + j]);
            FLASH_UNROLL
            for (int n = 0; n < Vectors; ++n) sum[r][n] = multiply_add(weight, x[n], sum[r][n]);
        }
    }
    FLASH_UNROLL
    for (int r = 0; r < Count; ++r) {
        FLASH_UNROLL
        for (int n = 0; n < Vectors; ++n) {
            A* at = o + r * o_stride + c + n * L;
            store(at, load(at) + sum[r][n]);
        }
    }
}

template <int Count, class T, class C>
static void small_q_output(const C* const* v, int64_t head, int64_t count, int64_t channels, const Acc<T>* p, int64_t p_stride,
                           Acc<T>* o, int64_t o_stride) {
    constexpr int L = kLanes<Acc<T>>, kMost = kVectorRegisters / 2 / Count;
    int64_t c = 0;
    for (; c + kMost * L <= channels; c += kMost * L)
        small_q_output_block<Count, kMost, T>(v, head, count, c, channels, p, p_stride, o, o_stride);
    if constexpr (kMost > 4)
        for (; c + 4 * L <= channels; c += 4 * L)
            small_q_output_block<Count, 4, T>(v, head, count, c, channels, p, p_stride, o, o_stride);
    for (; c < channels; c += L) small_q_output_block<Count, 1, T>(v, head, count, c, channels, p, p_stride, o, o_stride);
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
