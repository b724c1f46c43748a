// Scores from the products q.k, for a tile [key][lane]: scale, softcap, ALiBi, bias, masks, in the order of libflash.h.
#pragma once

#include "cpu/engine/exp.h"
#include "cpu/engine/lanes.h"
#include "cpu/positions.h"
#include "problem/sequence_keys.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// How the scores of one query head are computed from products.
template <class A>
struct ScoreRule {
    double exact_scale = 1;
    A scale = 1;
    A softcap = 0, softcap_inverse = 0;  // 0: off
    bool alibi = false;
    // score = scale * product with scale > 0: only keys outside the lanes' ranges need to be hidden.
    bool plain = true;
    const ScoreTensor *bias = nullptr, *mask = nullptr;
    int64_t batch = 0, head = 0;
    RowNumbers columns;        // with ALiBi: positions of the keys
    int64_t first_column = 0;  // with ALiBi: position of the first key, which is subtracted from the others
    // Decode, if a row may not see all keys of its range, else nullptr. Row n of a tile is row n / group of the sequence.
    const SequenceKeys* gaps = nullptr;
    int64_t group = 1;

    int64_t key_position(int64_t key) const { return gaps ? gaps->key_position(key) : columns(key) - first_column; }
    bool hides() const { return bias || mask; }

    // Call it after bias and mask are set. A softcap so large that it changes no finite score is ignored: its inverse would
    // underflow.
    void set(const ScoreOptions& options) {
        constexpr double huge = sizeof(A) == 4 ? 1e30 : 1e290;
        const double given = options.softmax_scale, cap = options.softcap;
        exact_scale = given > huge ? huge : given < -huge ? -huge : given;
        alibi = options.alibi_slopes.present;
        scale = static_cast<A>(exact_scale);
        if (cap > 0 && cap < huge) {
            softcap = static_cast<A>(cap > 1 / huge ? cap : 1 / huge);
            softcap_inverse = 1 / softcap;
        }
        plain = exact_scale > 1 / huge && exact_scale < huge && softcap == 0 && !alibi && !bias && !mask;
    }
};

// Elements of bias along a row, from offset `start` on, in the accumulator type. The row has `left` elements from there on.
template <class A>
FLASH_INLINE Vec<A> load_bias(const ScoreTensor& bias, int64_t start, int64_t left) {
    constexpr int L = kLanes<A>;
    const int64_t step = bias.stride[3];
    if (step == 1 && left >= L) {
        if constexpr (sizeof(A) == 4) {
            if (bias.dtype == DType::f32) return load_wide(static_cast<const float*>(bias.data) + start);
            if (bias.dtype == DType::bf16) return load_wide(static_cast<const bfloat16*>(bias.data) + start);
            if (bias.dtype == DType::f16) return load_wide(static_cast<const half*>(bias.data) + start);
        } else {
            if (bias.dtype == DType::f64) return load_wide(static_cast<const double*>(bias.data) + start);
        }
    }
    alignas(64) A part[L] = {};
    for (int64_t n = 0; n < L && n < left; ++n) part[n] = static_cast<A>(load_as(bias.dtype, bias.data, start + n * step));
    return load(part);
}

// 0 where the mask is true, -infinity where it hides the key.
template <class A>
FLASH_INLINE Vec<A> load_mask(const ScoreTensor& mask, int64_t start, int64_t left) {
    constexpr int L = kLanes<A>;
    typedef uint8_t Bytes __attribute__((vector_size(L)));
    const uint8_t* data = static_cast<const uint8_t*>(mask.data) + start;
    const int64_t step = mask.stride[3];
    alignas(64) uint8_t part[L] = {};
    if (step == 1 && left >= L)
        std::memcpy(part, data, L);
    else
        for (int64_t n = 0; n < L && n < left; ++n) part[n] = data[n * step];
    Bytes bytes;
    std::memcpy(&bytes, part, L);
    return __builtin_convertvector(bytes, Vec<Integer<A>>) != 0 ? Vec<A>{} : broadcast<A>(-kInfinity<A>);
}

FLASH_INLINE int64_t row_start(const ScoreTensor& t, int64_t batch, int64_t head, int64_t row, int64_t key) {
    return batch * t.stride[0] + head * t.stride[1] + row * t.stride[2] + key * t.stride[3];
}

// Bias and mask of a tile as one summand: to[key][lane], -infinity where the key is hidden.
template <class A>
static void load_additive_mask(const ScoreRule<A>& rule, const Lanes<A>& lanes, int64_t first, int64_t count, A* to) {
    const auto row = [&](int64_t r, int64_t c) __attribute__((always_inline)) {
        Vec<A> v{};
        if (rule.bias)
            v = load_bias<A>(*rule.bias, row_start(*rule.bias, rule.batch, rule.head, lanes.row0 + r, first + c), count - c);
        if (rule.mask) {
            const Vec<A> hidden =
                load_mask<A>(*rule.mask, row_start(*rule.mask, rule.batch, rule.head, lanes.row0 + r, first + c), count - c);
            v = hidden < 0 ? hidden : v;
        }
        return v;
    };
    transpose_rows<A>(lanes.rows, lanes.width, count, to, lanes.width, row);
    for (int64_t i = lanes.rows; i < lanes.width; ++i)  // unused lanes hide everything, NaN included
        for (int64_t j = 0; j < count; ++j) to[j * lanes.width + i] = -kInfinity<A>;
}

// Hides the keys outside the ranges of the lanes.
template <class A>
static void hide_outside(const Lanes<A>& lanes, int64_t first, int64_t count, A* tile) {
    using I = Vec<Integer<A>>;
    for (int64_t i = 0; i < lanes.width; i += kLanes<A>) {
        const I from = load(lanes.first_key + i), to = load(lanes.last_key + i);
        for (int64_t j = 0; j < count; ++j) {
            const I key = broadcast<Integer<A>>(static_cast<Integer<A>>(first + j));
            A* at = tile + j * lanes.width + i;
            store(at, ((from <= key) & (key < to)) ? load(at) : broadcast<A>(-kInfinity<A>));
        }
    }
}

// Stores `value` at the gaps: keys in a row's range that the row does not see. Element (row n, key j) is
// tile[n * row_step + j * key_step].
template <class A>
static void fill_gaps(const ScoreRule<A>& rule, const Lanes<A>& lanes, int64_t first, int64_t count, A* tile, int64_t row_step,
                      int64_t key_step, A value) {
    for (int64_t n = 0; n < lanes.rows; ++n) {
        const int64_t row = (lanes.row0 + n) / rule.group, gap = rule.gaps->first_gap(row);
        for (int64_t j = gap > first ? gap - first : 0; j < count; ++j)
            if (!rule.gaps->sees(row, first + j)) tile[n * row_step + j * key_step] = value;
    }
}

template <class A>
static void hide_gaps(const ScoreRule<A>& rule, const Lanes<A>& lanes, int64_t first, int64_t count, A* tile, int64_t row_step,
                      int64_t key_step) {
    fill_gaps(rule, lanes, first, count, tile, row_step, key_step, -kInfinity<A>);
}

template <class A>
FLASH_INLINE bool is_edge_tile(const Lanes<A>& lanes, int64_t first, int64_t count) {
    return first < lanes.seen_by_all.first || first + count > lanes.seen_by_all.last;
}

// Applies scale and softcap to vectors of products.
template <class A>
struct ScaleAndCap {
    const Vec<A> scale, cap, cap_inverse;
    const bool capped;

    FLASH_INLINE explicit ScaleAndCap(const ScoreRule<A>& rule)
        : scale(broadcast(rule.scale)), cap(broadcast(rule.softcap)), cap_inverse(broadcast(rule.softcap_inverse)),
          capped(rule.softcap != 0) {}

    // `slope`: if not nullptr, receives the derivative of the softcap.
    FLASH_INLINE Vec<A> apply(Vec<A> product, A* slope) const {
        const Vec<A> z = product * scale;
        if (!capped) return z;
        const Vec<A> tanh_value = tanh<A>(z * cap_inverse);
        if (slope) store(slope, 1 - tanh_value * tanh_value);
        return cap * tanh_value;
    }
};

// Computes scores from products in place. `additive`: buffer of one tile for bias and mask. `slope`: if not nullptr, receives the
// derivative of the softcap.
template <class A>
static void make_scores(const ScoreRule<A>& rule, const Lanes<A>& lanes, int64_t first, int64_t count, A* tile, A* additive,
                        A* slope) {
    const bool additive_mask = rule.hides();
    if (additive_mask) load_additive_mask(rule, lanes, first, count, additive);
    const ScaleAndCap<A> scale_and_cap(rule);
    for (int64_t j = 0; j < count; ++j) {
        const A key = rule.alibi ? static_cast<A>(rule.key_position(first + j)) : A(0);
        for (int64_t i = 0; i < lanes.width; i += kLanes<A>) {
            const int64_t at = j * lanes.width + i;
            Vec<A> z = scale_and_cap.apply(load(tile + at), slope ? slope + at : nullptr);
            if (rule.alibi) z -= load(lanes.alibi_slope + i) * magnitude(load(lanes.alibi_position + i) - key);
            if (additive_mask) {
                const Vec<A> more = load(additive + at);
                z = more == -kInfinity<A> ? more : z + more;
            }
            store(tile + at, z);
        }
    }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
