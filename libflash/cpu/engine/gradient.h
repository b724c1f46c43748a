// One step of the backward pass for a query tile and a key tile. It recomputes the scores, computes the probabilities from the
// scores and LSE, and the score gradients from the probabilities; all are stored [key][lane]. Then it adds to dq, dk and dv.
#pragma once

#include "cpu/engine/attend.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// A query tile as operands: transposed for products that sum over channels, in rows for products that sum over queries.
template <class T>
struct GradientQueryTile {
    using A = Acc<T>;
    Lanes<A> lanes;
    Element<T>*q_columns = nullptr, *dout_columns = nullptr;
    Element<T>*q_rows = nullptr, *dout_rows = nullptr;  // [row or pair of rows][channel, padded to whole vectors]
    // LSE; +infinity for rows without a visible key, which makes their probabilities 0.
    const A* lse = nullptr;
    const A* delta = nullptr;

    void lay_out(Arena& arena, HeadDims dims, int64_t width) {
        lanes.lay_out(arena);
        q_columns = arena.allocate<Element<T>>(elements_for<T>(dims.qk) * width);
        dout_columns = arena.allocate<Element<T>>(elements_for<T>(dims.v) * width);
        q_rows = arena.allocate<Element<T>>(elements_for<T>(width) * round_up(dims.qk, kLanes<A>));
        dout_rows = arena.allocate<Element<T>>(elements_for<T>(width) * round_up(dims.v, kLanes<A>));
    }

    template <class Rows>
    void load(const Rows& q, const Rows& dout, HeadDims dims, bool with_rows) {
        pack_columns<T>(q, lanes.rows, lanes.width, dims.qk, q_columns);
        pack_columns<T>(dout, lanes.rows, lanes.width, dims.v, dout_columns);
        if (!with_rows) return;
        pack_row_elements<T>(q, 0, lanes.rows, dims.qk, round_up(dims.qk, kLanes<A>), q_rows);
        pack_row_elements<T>(dout, 0, lanes.rows, dims.v, round_up(dims.v, kLanes<A>), dout_rows);
    }
};

// Keys first to first + count - 1, and the accumulators of their gradients.
template <class T>
struct GradientKeyTile {
    int64_t first = 0, count = 0;
    Operand<Element<T>> k, v;        // in rows, for sums over channels
    Operand<Element<T>> k_elements;  // for sums over keys
    Acc<T>*dk = nullptr, *dv = nullptr;
};

// Scratch memory of one step; one per thread. With bf16 pairs, p and ds are stored in the layouts that the products need.
template <class T>
struct GradientScratch {
    using A = Acc<T>;
    A *scores = nullptr, *dp = nullptr;                        // overwritten by p (after dropout) and ds
    A *additive = nullptr, *slope = nullptr, *kept = nullptr;  // bias and mask; derivative of the softcap; dropout factors
    Element<T>*p_rows = nullptr, *ds_rows = nullptr;           // [key][lane or pair of lanes]
    Element<T>* ds_pairs = nullptr;                            // [key or pair of keys][lane]

    void lay_out(Arena& arena, int64_t tile_k, bool additive_mask, bool softcap, bool dropout, int64_t width) {
        const int64_t tile = tile_k * width;
        scores = arena.allocate<A>(tile);
        dp = arena.allocate<A>(tile);
        if (additive_mask) additive = arena.allocate<A>(tile);
        if (softcap) slope = arena.allocate<A>(tile);
        if (dropout) kept = arena.allocate<A>(tile);
        if constexpr (kPaired<T>) {
            p_rows = arena.allocate<Element<T>>(tile / 2);
            ds_rows = arena.allocate<Element<T>>(tile / 2);
            ds_pairs = arena.allocate<Element<T>>(elements_for<T>(tile_k) * width);
        } else {
            p_rows = scores;
            ds_rows = ds_pairs = dp;
        }
    }
};

template <class A>
struct ElementGradient {
    Vec<A> p, ds;
};

// kRare: with softcap, dropout or hidden keys.
template <class T, bool kRare>
struct GradientStep {
    using A = Acc<T>;
    const GradientScratch<T>& scratch;
    const Vec<A> scale;
    const bool softcap, dropout;

    FLASH_INLINE ElementGradient<A> at(int64_t index, Vec<A> lse, Vec<A> delta) const {
        const Vec<A> s = load(scratch.scores + index);
        // lse is subtracted before the conversion to base 2. The exact difference is at most 0; lse is rounded.
        const Vec<A> below = minimum(Vec<A>{}, multiply_add(s, scale, -lse));
        Vec<A> p = exp<A>(below), dp = load(scratch.dp + index);
        if constexpr (!kRare) return {p, p * (dp - delta)};
        p = s == -kInfinity<A> ? Vec<A>{} : p;  // lse may be NaN
        Vec<A> p_kept = p;
        if (dropout) {
            const Vec<A> kept = load(scratch.kept + index);
            dp = kept == 0 ? Vec<A>{} : dp * kept;
            p_kept = p * kept;
        }
        Vec<A> ds = p * (dp - delta);
        if (softcap) ds *= load(scratch.slope + index);
        return {p_kept, s == -kInfinity<A> ? Vec<A>{} : ds};  // dp or slope of a hidden key may be NaN
    }
};

#if FLASH_BF16_DOT
FLASH_INLINE void store_bf16(Pair* row, int64_t lane, F32 v) { store_narrow(reinterpret_cast<bfloat16*>(row) + lane, v); }
#endif

// Stores p and ds of key j for the vector of lanes that begins at lane i. With kPacked it stores them as operands of products;
// with pairs, p and ds of key j + 1 too, if there is one. Without kPacked it overwrites scores and dp.
template <bool kPacked, class T>
FLASH_INLINE void store_gradients(const GradientScratch<T>& scratch, int64_t j, int64_t i, int64_t width,
                                  const ElementGradient<Acc<T>>& here, [[maybe_unused]] const ElementGradient<Acc<T>>& next,
                                  [[maybe_unused]] bool has_next) {
    if constexpr (kPaired<T> && kPacked) {
#if FLASH_BF16_DOT
        store(&scratch.ds_pairs[j / 2 * width + i].bits, make_pairs(here.ds, next.ds));
        store_bf16(scratch.p_rows + j * (width / 2), i, here.p);
        store_bf16(scratch.ds_rows + j * (width / 2), i, here.ds);
        if (has_next) {
            store_bf16(scratch.p_rows + (j + 1) * (width / 2), i, next.p);
            store_bf16(scratch.ds_rows + (j + 1) * (width / 2), i, next.ds);
        }
#endif
    } else {
        store(scratch.scores + j * width + i, here.p);
        store(scratch.dp + j * width + i, here.ds);
    }
}

template <bool kPacked, class T, bool kRare>
static void gradient_tile(const GradientStep<T, kRare>& step, const GradientQueryTile<T>& query_tile, int64_t count) {
    using A = Acc<T>;
    const GradientScratch<T>& scratch = step.scratch;
    const int64_t width = query_tile.lanes.width;
    for (int64_t i = 0; i < width; i += kLanes<A>) {
        const Vec<A> lse = load(query_tile.lse + i), delta = load(query_tile.delta + i);
        for (int64_t j = 0; j < count; j += kPacked ? kValuesPerElement<T> : 1) {
            const int64_t index = j * width + i;
            const ElementGradient<A> here = step.at(index, lse, delta);
            ElementGradient<A> next{};
            const bool has_next = kPaired<T> && kPacked && j + 1 < count;
            if (has_next) next = step.at(index + width, lse, delta);
            store_gradients<kPacked, T>(scratch, j, i, width, here, next, has_next);
        }
    }
}

// Fills kept[key][lane] with the dropout factors, 0 or Dropout::keep_factor().
template <class A>
static void fill_kept(const DropoutMask& mask, const Lanes<A>& lanes, int64_t first, int64_t count, A* kept) {
    const Vec<A> factor = broadcast(static_cast<A>(mask.kept));
    for (int64_t at = 0; at < count * lanes.width; at += kLanes<A>) store(kept + at, factor);
    drop(mask, lanes, first, count, kept);
}

// Computes probabilities and score gradients of one tile in `scratch`; returns whether the tile has hidden keys. If
// scratch.slope is nullptr, the gradients are those of the scores after the softcap, which dbias needs.
template <bool kPacked, class T>
static bool score_gradients(const GradientQueryTile<T>& query_tile, const GradientKeyTile<T>& tile, HeadDims dims,
                            const ScoreRule<Acc<T>>& rule, const DropoutMask* dropout, const GradientScratch<T>& scratch) {
    using A = Acc<T>;
    using E = Element<T>;
    const int64_t width = query_tile.lanes.width;
    multiply<E>({tile.count, width, elements_for<T>(dims.qk), tile.k.data, tile.k.stride, 1, query_tile.q_columns, width,
                 scratch.scores, width, Start::zero, nullptr});
    multiply<E>({tile.count, width, elements_for<T>(dims.v), tile.v.data, tile.v.stride, 1, query_tile.dout_columns, width,
                 scratch.dp, width, Start::zero, nullptr});
    if (!rule.plain)
        make_scores<A>(rule, query_tile.lanes, tile.first, tile.count, scratch.scores, scratch.additive, scratch.slope);
    const bool edge = is_edge_tile(query_tile.lanes, tile.first, tile.count);
    if (edge) hide_outside(query_tile.lanes, tile.first, tile.count, scratch.scores);
    if (dropout) fill_kept(*dropout, query_tile.lanes, tile.first, tile.count, scratch.kept);
    const Vec<A> scale = broadcast(rule.plain ? rule.scale : A(1));
    const bool hides = edge || rule.hides(), softcap = rule.softcap != 0 && scratch.slope;
    if (hides || softcap || dropout)
        gradient_tile<kPacked, T, true>({scratch, scale, softcap, dropout != nullptr}, query_tile, tile.count);
    else
        gradient_tile<kPacked, T, false>({scratch, scale, false, false}, query_tile, tile.count);
    return hides;
}

// The whole step: adds to dk and dv of the key tile ([key][channel, padded]) and to dq of the query tile ([channel][lane]).
template <class T>
static void add_gradients(const GradientQueryTile<T>& query_tile, const GradientKeyTile<T>& tile, HeadDims dims,
                          const ScoreRule<Acc<T>>& rule, const DropoutMask* dropout, const GradientScratch<T>& scratch,
                          Acc<T>* dq) {
    using A = Acc<T>;
    using E = Element<T>;
    const bool hides = score_gradients<true>(query_tile, tile, dims, rule, dropout, scratch);
    const int64_t width = query_tile.lanes.width, row = width / kValuesPerElement<T>,
                  queries = elements_for<T>(query_tile.lanes.rows);
    const int64_t width_k = round_up(dims.qk, kLanes<A>), width_v = round_up(dims.v, kLanes<A>);
    multiply_masked<Weights::a, E>({tile.count, width_v, queries, scratch.p_rows, row, 1, query_tile.dout_rows, width_v, tile.dv,
                                    width_v, Start::add, nullptr},
                                   hides);
    multiply_masked<Weights::a, E>({tile.count, width_k, queries, scratch.ds_rows, row, 1, query_tile.q_rows, width_k, tile.dk,
                                    width_k, Start::add, nullptr},
                                   hides);
    multiply_masked<Weights::b, E>({dims.qk, width, elements_for<T>(tile.count), tile.k_elements.data, 1, tile.k_elements.stride,
                                    scratch.ds_pairs, width, dq, width, Start::add, nullptr},
                                   hides || (kPaired<T> && tile.count % 2 != 0));
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
