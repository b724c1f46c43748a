// One step of the forward pass: a query tile attends to a key tile. Shared by forward and decode.
//
// Scores, probabilities and the output are stored transposed, [key][lane] and [channel][lane], where a lane is a query row. Row
// maximum, exponentials and row sums then need no operations across lanes, and elements of K and V are broadcast from their rows
// in memory.
#pragma once

#include "cpu/engine/blocked_sum.h"
#include "cpu/engine/dropout.h"
#include "cpu/engine/masked_gemm.h"
#include "cpu/engine/score.h"
#include "cpu/engine/softmax.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

struct HeadDims {
    int64_t qk = 0, v = 0;  // channels of Q and K; of V and O
};

// Keys first to first + count - 1 as operands of the two products.
template <class T>
struct KeyTile {
    int64_t first = 0, count = 0;
    Operand<Element<T>> k;  // [key][channel or pair of channels]
    Operand<Element<T>> v;  // [key or pair of keys][channel]
};

template <class T>
struct KeyTileScratch {
    Element<T>*k = nullptr, *v = nullptr;

    void lay_out(Arena& arena, HeadDims dims, int64_t tile_k) {
        k = arena.allocate<Element<T>>(tile_k * elements_for<T>(dims.qk));
        v = arena.allocate<Element<T>>(elements_for<T>(tile_k) * dims.v);
    }
};

template <class T, class KeyRows, class ValueRows>
FLASH_INLINE KeyTile<T> load_key_tile(const KeyRows& k, const ValueRows& v, HeadDims dims, int64_t first, int64_t count,
                                      const KeyTileScratch<T>& scratch) {
    return {first, count, rows_operand<T>(k, first, count, dims.qk, scratch.k, Reads::once),
            row_elements_operand<T>(v, first, count, dims.v, scratch.v)};
}

// Scratch memory of one step; one per thread.
template <class T>
struct TileScratch {
    Acc<T>*scores = nullptr, *additive = nullptr;
    Element<T>* p = nullptr;

    void lay_out(Arena& arena, int64_t tile_k, bool additive_mask, int64_t width = kQueryTileRows) {
        scores = arena.allocate<Acc<T>>(tile_k * width);
        if (additive_mask) additive = arena.allocate<Acc<T>>(tile_k * width);
        if constexpr (kPaired<T>) p = arena.allocate<Element<T>>(elements_for<T>(tile_k) * width);
    }
};

// A query tile with its softmax state and its output accumulators.
template <class T>
struct QueryTile {
    Lanes<Acc<T>> lanes;
    SoftmaxState<Acc<T>> softmax;
    Element<T>* q = nullptr;  // [channel or pair][lane]
    Acc<T>* o = nullptr;      // [channel][lane], not yet divided by the row sum
    bool empty = true;        // no key tile so far, or none since the last addition to the totals
    BlockedSums<Acc<T>> totals;

    void lay_out(Arena& arena, HeadDims dims, int64_t most_keys, int64_t width = kQueryTileRows, bool entropy = false) {
        lanes.lay_out(arena);
        softmax.lay_out(arena, entropy);
        q = arena.allocate<Element<T>>(elements_for<T>(dims.qk) * width);
        o = arena.allocate<Acc<T>>(dims.v * width);
        totals.lay_out(arena, most_keys, dims.v * width, kSumBlockKeys, entropy);
    }

    template <class Rows>
    void load_queries(const Rows& rows, HeadDims dims) {
        pack_columns<T>(rows, lanes.rows, lanes.width, dims.qk, q);
        start();
    }
    void start() {
        softmax.start(lanes.width);
        totals.start();
        empty = true;
    }
};

template <class A>
constexpr A kLog2e = static_cast<A>(1.44269504088896340736L);

// The factor that converts the scores that softmax_tile() reads to exponents of 2 (`unit` in other functions). With a plain rule
// these scores are the products q.k, and the factor contains the scale.
template <class A>
FLASH_INLINE A score_unit(const ScoreRule<A>& rule) {
    return rule.plain ? static_cast<A>(rule.exact_scale * 1.44269504088896340736) : kLog2e<A>;
}

template <class T, bool kInPlace>
FLASH_INLINE void softmax_step(SoftmaxState<Acc<T>>& state, Acc<T>* scores, int64_t count, int64_t width, Acc<T> unit,
                               Element<T>* p) {
    if (state.exponent_sum)
        softmax_tile<T, kInPlace, true>(state, scores, count, width, unit, p);
    else
        softmax_tile<T, kInPlace>(state, scores, count, width, unit, p);
}

template <class T>
static void attend(QueryTile<T>& query_tile, const KeyTile<T>& tile, HeadDims dims, const ScoreRule<Acc<T>>& rule,
                   const DropoutMask* dropout, const TileScratch<T>& scratch) {
    using A = Acc<T>;
    using E = Element<T>;
    Lanes<A>& lanes = query_tile.lanes;
    const int64_t width = lanes.width;
    multiply<E>({tile.count, width, elements_for<T>(dims.qk), tile.k.data, tile.k.stride, 1, query_tile.q, width, scratch.scores,
                 width, Start::zero, nullptr});
    if (!rule.plain) make_scores<A>(rule, lanes, tile.first, tile.count, scratch.scores, scratch.additive, nullptr);
    const bool edge = is_edge_tile(lanes, tile.first, tile.count);
    if (edge) hide_outside(lanes, tile.first, tile.count, scratch.scores);
    if (rule.gaps) hide_gaps<A>(rule, lanes, tile.first, tile.count, scratch.scores, 1, width);

    E* p;
    if constexpr (kPaired<T>)
        p = scratch.p;
    else
        p = scratch.scores;
    if (dropout) {
        softmax_step<T, true>(query_tile.softmax, scratch.scores, tile.count, width, score_unit(rule), p);
        drop(*dropout, lanes, tile.first, tile.count, scratch.scores);
        pack_probabilities<T>(scratch.scores, tile.count, width, p);
    } else {
        softmax_step<T, false>(query_tile.softmax, scratch.scores, tile.count, width, score_unit(rule), p);
    }
    multiply_masked<Weights::b, E>(
        {dims.v, width, elements_for<T>(tile.count), tile.v.data, 1, tile.v.stride, p, width, query_tile.o, width,
         query_tile.empty ? Start::zero : Start::scaled, query_tile.softmax.rescale},
        edge || rule.hides() || rule.gaps || (kPaired<T> && tile.count % 2 != 0));
    query_tile.empty = false;
}

// Writes the LSE, with the sink, to lse[lane]; -infinity for rows with neither a visible key nor a sink. Leaves in
// softmax.rescale the factor by which the output accumulators must be multiplied. The sink of lane i is sinks[i * sink_step];
// sinks may be nullptr. `kept`: Dropout::keep_factor(), or 1. `sink_weights`: if not nullptr, receives the probabilities of the
// sinks.
template <class T>
static void finish_query_tile(QueryTile<T>& query_tile, const ScoreRule<Acc<T>>& rule, const double* sinks, int64_t sink_step,
                              double kept, Acc<T>* lse, Acc<T>* sink_weights = nullptr) {
    using A = Acc<T>;
    for (int64_t i = 0; i < query_tile.lanes.rows; ++i) {
        const double* sink = sinks ? sinks + i * sink_step : nullptr;
        const double unit = rule.plain ? rule.exact_scale : 1.0;
        const A row_max = query_tile.softmax.row_max[i];
        double top = static_cast<double>(row_max) * unit, sum = query_tile.softmax.row_sum[i], factor = 1;
        if (row_max == -kInfinity<A> && sum == sum) top = -kInfinity<double>;
        if (sink && *sink > top) {
            factor = row_max == -kInfinity<A> ? 0 : __builtin_exp(top - *sink);
            sum = sum * factor + 1;
            top = *sink;
        } else if (sink && *sink != -kInfinity<double>) {
            sum += __builtin_exp(*sink - top);
        }
        const bool nothing = sum == 0;
        if (sink_weights) sink_weights[i] = *sink == -kInfinity<double> ? A(0) : static_cast<A>(__builtin_exp(*sink - top) / sum);
        lse[i] = static_cast<A>(nothing ? -kInfinity<double> : top + __builtin_log(sum));
        query_tile.softmax.rescale[i] = static_cast<A>(nothing ? 0 : factor * kept / sum);
    }
    for (int64_t i = query_tile.lanes.rows; i < query_tile.lanes.width; ++i) query_tile.softmax.rescale[i] = 0;
}

// Scales the output accumulators. Rows without a visible key become 0.
template <class T>
static void scale_output(const QueryTile<T>& query_tile, HeadDims dims) {
    using A = Acc<T>;
    constexpr int L = kLanes<A>;
    const int64_t width = query_tile.lanes.width;
    for (int64_t c = 0; c < dims.v; ++c)
        for (int64_t i = 0; i < width; i += L) {
            A* at = query_tile.o + c * width + i;
            const Vec<A> factor = load(query_tile.softmax.rescale + i);
            store(at, factor == 0 ? Vec<A>{} : load(at) * factor);  // the accumulator may be NaN: 0 * NaN is not 0
        }
}

// Rounds the output rows to the storage type. Rows without a visible key become 0.
template <class T, class Rows>
static void store_output(const QueryTile<T>& query_tile, HeadDims dims, const Rows& out) {
    using A = Acc<T>;
    if (query_tile.empty) {
        for (int64_t r = 0; r < query_tile.lanes.rows; ++r)
            std::memset(static_cast<void*>(out(r)), 0, static_cast<size_t>(dims.v) * sizeof(*out(r)));
        return;
    }
    scale_output(query_tile, dims);
    transpose_columns<A>(query_tile.o, query_tile.lanes.width, query_tile.lanes.rows, dims.v,
                         [&](int64_t r, int64_t c, Vec<A> v)
                             __attribute__((always_inline)) { store_part(out(r) + c, v, dims.v - c); });
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
