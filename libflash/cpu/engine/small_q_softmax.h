// Decode with vectors along the channels: the online softmax of a row, and sums of segments of keys.
#pragma once

#include "cpu/engine/small_q_elements.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// Turns the products of one row into scores; hidden keys become -infinity.
template <class A>
static void small_q_scores(const ScoreRule<A>& rule, const Lanes<A>& lanes, int64_t r, int64_t first, int64_t count, A* scores) {
    using I = Vec<Integer<A>>;
    const ScaleAndCap<A> scale_and_cap(rule);
    const I from = broadcast(lanes.first_key[r]), to = broadcast(lanes.last_key[r]);
    for (int64_t j = 0; j < count; j += kLanes<A>) {
        const I key = lane_numbers<Integer<A>>() + static_cast<Integer<A>>(first + j);
        I position = key;
        for (int i = 0; rule.gaps && i < kLanes<A> && j + i < count; ++i)
            position[i] = static_cast<Integer<A>>(rule.key_position(first + j + i));
        Vec<A> z = load(scores + j);
        if (!rule.plain) {
            z = scale_and_cap.apply(z, nullptr);
            if (rule.alibi)
                z -= broadcast(lanes.alibi_slope[r]) *
                     magnitude(broadcast(lanes.alibi_position[r]) - __builtin_convertvector(position, Vec<A>));
        }
        store(scores + j, ((from <= key) & (key < to)) ? z : broadcast<A>(-kInfinity<A>));
    }
}

// before + the sum of p, in the order in which small_q_output() adds p * v: if all values are 1, the output is exactly 1.
static float add_as_output(const float* p, int64_t count, float before) {
    float parts[kSmallQKeys / kSmallQValues] = {};
    const int64_t whole = count / kSmallQValues;
    for (int64_t j = 0; j < kSmallQValues; ++j)
        for (int64_t part = 0; part < whole; ++part) parts[part] += p[part * kSmallQValues + j];
    for (int64_t j = whole * kSmallQValues; j < count; ++j) parts[whole] += p[j];
    for (int64_t part = 0; part * kSmallQValues < count; ++part) before += parts[part];
    return before;
}

// Not inlined: the compiler could fuse these products with later additions, and for the output it could do so where it does not
// for the row sum. Then the two would be rounded differently.
template <class A>
__attribute__((noinline)) static void rescale_row(A* row_sum, A* o, int64_t elements, A factor) {
    *row_sum *= factor;
    for (int64_t c = 0; c < elements; c += kLanes<A>) store(o + c, load(o + c) * broadcast(factor));
}

// The online softmax of one row for a key tile: replaces scores by probabilities. If the row maximum rises, it rescales the row
// sum and the output of earlier keys.
template <class T>
static void small_q_softmax(const QueryTile<T>& query_tile, int64_t r, int64_t count, Acc<T> unit, Acc<T>* scores,
                            int64_t o_stride) {
    using A = Acc<T>;
    constexpr int L = kLanes<A>;
    const SoftmaxState<A>& state = query_tile.softmax;
    Vec<A> largest = broadcast(state.row_max[r]);
    for (int64_t j = 0; j < count; j += L) largest = maximum_of_numbers(load(scores + j), largest);
    A new_max = largest[0];
    for (int i = 1; i < L; ++i) new_max = largest[i] > new_max ? largest[i] : new_max;
    const Vec<A> shift = finite_maximum<A>(broadcast(new_max)), factor = broadcast(unit);
    if (new_max != state.row_max[r]) {
        const A rescale = exp2<A>((broadcast(state.row_max[r]) - shift) * factor)[0];
        rescale_row(state.row_sum + r, query_tile.o + r * o_stride, o_stride, rescale);
        state.row_max[r] = new_max;
    }
    Vec<A> sum{};
    for (int64_t j = 0; j < count; j += L) {
        const Vec<A> p = exp2<A>((load(scores + j) - shift) * factor);
        sum += p;
        store(scores + j, p);
    }
    if constexpr (std::is_same_v<T, float>)
        state.row_sum[r] = add_as_output(scores, count, state.row_sum[r]);
    else
        state.row_sum[r] += sum_of_lanes<A>(sum);
}

// Adds the softmax state and the output of a segment to those of all earlier segments, for one row. A segment in which the row
// sees no key has the sum 0 and changes nothing. The first other segment is copied bit for bit.
template <class A>
__attribute__((noinline)) static void fold_segment(A* row_max, A* row_sum, A* o, A segment_max, A segment_sum, const A* segment_o,
                                                   int64_t elements, A unit) {
    if (segment_sum == 0) return;
    if (*row_sum == 0) {
        *row_max = segment_max, *row_sum = segment_sum;
        std::memcpy(o, segment_o, static_cast<size_t>(elements) * sizeof(A));
        return;
    }
    const A top = segment_max > *row_max ? segment_max : *row_max;
    const Vec<A> shift = finite_maximum<A>(broadcast(top)), factor = broadcast(unit);
    const Vec<A> before = exp2<A>((broadcast(*row_max) - shift) * factor);
    const Vec<A> now = exp2<A>((broadcast(segment_max) - shift) * factor);
    *row_sum = multiply_add(broadcast(*row_sum), before, broadcast(segment_sum) * now)[0];
    for (int64_t c = 0; c < elements; c += kLanes<A>) store(o + c, multiply_add(load(o + c), before, load(segment_o + c) * now));
    *row_max = top;
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
