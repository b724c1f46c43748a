// One step of the tangent of backward for a query tile and a key tile. A name with the prefix t is a tangent; mu is the tangent
// of LSE. All tiles are stored [key][lane]:
//
//     dp = dout V^T and its tangent tdp, after dropout     below = ts - mu
//     ds = p (dp - delta)     tds = p below (dp - delta) + p (tdp - tdelta)
//     dz = g ds     tdz = tg ds + g tds     g, tg: slope of the softcap and its tangent
//
// Then it adds to the tangents of dq, dk and dv.
#pragma once

#include "cpu/engine/attend_tangent.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// The tangents of a query tile as operands, as in GradientQueryTile; nullptr where there is none.
template <class T>
struct TangentOperands {
    using A = Acc<T>;
    Element<T>*q_columns = nullptr, *dout_columns = nullptr, *q_rows = nullptr, *dout_rows = nullptr;
    const A *mu = nullptr, *delta = nullptr;  // tangents of LSE and of delta; 0 for rows without a visible key

    void lay_out(Arena& arena, const Tangents& given, HeadDims dims, int64_t width) {
        if (given.q.present) {
            q_columns = arena.allocate<Element<T>>(elements_for<T>(dims.qk) * width);
            q_rows = arena.allocate<Element<T>>(elements_for<T>(width) * round_up(dims.qk, kLanes<A>));
        }
        if (given.dout.present) {
            dout_columns = arena.allocate<Element<T>>(elements_for<T>(dims.v) * width);
            dout_rows = arena.allocate<Element<T>>(elements_for<T>(width) * round_up(dims.v, kLanes<A>));
        }
    }

    // `q` and `dout`: rows of their tangents, from the first row of the lanes on; without data if there is none.
    void load(const Lanes<A>& lanes, const StridedRows<const T>& q, const StridedRows<const T>& dout, HeadDims dims,
              bool with_rows) {
        if (q.data) {
            pack_columns<T>(q, lanes.rows, lanes.width, dims.qk, q_columns);
            if (with_rows) pack_row_elements<T>(q, 0, lanes.rows, dims.qk, round_up(dims.qk, kLanes<A>), q_rows);
        }
        if (dout.data) {
            pack_columns<T>(dout, lanes.rows, lanes.width, dims.v, dout_columns);
            if (with_rows) pack_row_elements<T>(dout, 0, lanes.rows, dims.v, round_up(dims.v, kLanes<A>), dout_rows);
        }
    }
};

// The tangents of a key tile; without data where there is none.
template <class T>
struct TangentKeyOperands {
    Operand<Element<T>> k, v, k_elements;
};

template <class A>
struct ElementTangent {
    ElementGradient<A> gradient;  // p after dropout, dz
    ElementGradient<A> tangent;   // of both
    Vec<A> tds;
};

// Scratch memory of one step. `gradient` holds scores and dp, then p and dz; `tangent` their tangents.
template <class T>
struct GradientTangentScratch {
    using A = Acc<T>;
    const GradientScratch<T>& gradient;
    const GradientScratch<T>& tangent;
    A *tanh = nullptr, *tbias = nullptr;  // with softcap; with a tangent of bias
};

// kRare: with softcap, dropout, hidden keys or a tangent of bias.
template <class T, bool kRare>
struct GradientTangentStep {
    using A = Acc<T>;
    const GradientTangentScratch<T>& scratch;
    const Vec<A> unit;     // factor of the scores: the scale, or 1 if they include it
    const Vec<A> scale;    // factor of the tangents of the products
    const Vec<A> inverse;  // 1 / softcap
    const bool softcap, dropout;

    struct Rows {
        Vec<A> lse, delta, mu, tdelta;
    };

    FLASH_INLINE ElementTangent<A> at(int64_t index, const Rows& row) const {
        const Vec<A> s = load(scratch.gradient.scores + index);
        Vec<A> p = exp<A>(minimum(Vec<A>{}, multiply_add(s, unit, -row.lse)));
        Vec<A> dp = load(scratch.gradient.dp + index), tdp = load(scratch.tangent.dp + index);
        Vec<A> ts = load(scratch.tangent.scores + index) * scale;
        if constexpr (!kRare) {
            const Vec<A> below = ts - row.mu, tp = p * below, excess = dp - row.delta;
            const Vec<A> tds = multiply_add(tp, excess, p * (tdp - row.tdelta));
            return {{p, p * excess}, {tp, tds}, tds};
        }
        const auto hidden = s == -kInfinity<A>;
        p = hidden ? Vec<A>{} : p;  // lse may be NaN
        Vec<A> slope = broadcast<A>(1), slope_tangent{};
        if (softcap) {
            slope = load(scratch.gradient.slope + index);
            slope_tangent = -2 * load(scratch.tanh + index) * slope * ts * inverse;
            ts *= slope;
        }
        if (scratch.tbias) ts += load(scratch.tbias + index);
        const Vec<A> below = ts - row.mu;
        Vec<A> p_kept = p;
        if (dropout) {
            const Vec<A> kept = load(scratch.gradient.kept + index);
            dp = kept == 0 ? Vec<A>{} : dp * kept;
            tdp = kept == 0 ? Vec<A>{} : tdp * kept;
            p_kept = p * kept;
        }
        const Vec<A> excess = dp - row.delta, ds = p * excess;
        const Vec<A> tds = p * below * excess + p * (tdp - row.tdelta);
        // x of a hidden key may be NaN.
        const auto shown = [&](Vec<A> x) __attribute__((always_inline)) { return hidden ? Vec<A>{} : x; };
        return {{p_kept, shown(slope * ds)}, {shown(p_kept * below), shown(slope_tangent * ds + slope * tds)}, shown(tds)};
    }
};

// kPacked: stores p, dz and their tangents as operands of the products; otherwise tds alone, over the tangent of dp.
template <bool kPacked, class T, bool kRare>
static void gradient_tangent_tile(const GradientTangentStep<T, kRare>& step, const GradientQueryTile<T>& query_tile,
                                  const TangentOperands<T>& tangents, int64_t count) {
    using A = Acc<T>;
    const int64_t width = query_tile.lanes.width;
    for (int64_t i = 0; i < width; i += kLanes<A>) {
        const typename GradientTangentStep<T, kRare>::Rows row{load(query_tile.lse + i), load(query_tile.delta + i),
                                                               load(tangents.mu + i), load(tangents.delta + i)};
        for (int64_t j = 0; j < count; j += kPacked ? kValuesPerElement<T> : 1) {
            const ElementTangent<A> here = step.at(j * width + i, row);
            if constexpr (kPacked) {
                ElementTangent<A> next{};
                const bool has_next = kPaired<T> && j + 1 < count;
                if (has_next) next = step.at((j + 1) * width + i, row);
                store_gradients<true, T>(step.scratch.gradient, j, i, width, here.gradient, next.gradient, has_next);
                store_gradients<true, T>(step.scratch.tangent, j, i, width, here.tangent, next.tangent, has_next);
            } else {
                store(step.scratch.tangent.dp + j * width + i, here.tds);
            }
        }
    }
}

// tanh(z / softcap), where z is the scale times a product in `scores`.
template <class A>
static void fill_tanh(const ScoreRule<A>& rule, int64_t elements, const A* scores, A* to) {
    const Vec<A> factor = broadcast(rule.scale), inverse = broadcast(rule.softcap_inverse);
    for (int64_t at = 0; at < elements; at += kLanes<A>) store(to + at, tanh<A>(load(scores + at) * factor * inverse));
}

// Computes what gradient_tangent_tile() stores; returns whether the tile has hidden keys.
template <bool kPacked, class T>
static bool score_gradient_tangents(const Tangents& given, const GradientQueryTile<T>& query_tile,
                                    const TangentOperands<T>& tangents, const GradientKeyTile<T>& tile,
                                    const TangentKeyOperands<T>& tkeys, HeadDims dims, const ScoreRule<Acc<T>>& rule,
                                    const DropoutMask* dropout, const GradientTangentScratch<T>& scratch) {
    using A = Acc<T>;
    using E = Element<T>;
    const Lanes<A>& lanes = query_tile.lanes;
    const int64_t width = lanes.width, count = tile.count, first = tile.first;
    const GradientScratch<T>& tiles = scratch.gradient;
    multiply<E>({count, width, elements_for<T>(dims.qk), tile.k.data, tile.k.stride, 1, query_tile.q_columns, width, tiles.scores,
                 width, Start::zero, nullptr});
    multiply<E>({count, width, elements_for<T>(dims.v), tile.v.data, tile.v.stride, 1, query_tile.dout_columns, width, tiles.dp,
                 width, Start::zero, nullptr});
    multiply_tangents<T>(tile.k, tangents.q_columns, tkeys.k, query_tile.q_columns, count, width, dims.qk,
                         scratch.tangent.scores);
    multiply_tangents<T>(tile.v, tangents.dout_columns, tkeys.v, query_tile.dout_columns, count, width, dims.v,
                         scratch.tangent.dp);
    const bool softcap = rule.softcap != 0;
    if (softcap) fill_tanh(rule, count * width, tiles.scores, scratch.tanh);
    if (!rule.plain) make_scores<A>(rule, lanes, first, count, tiles.scores, tiles.additive, softcap ? tiles.slope : nullptr);
    const bool edge = is_edge_tile(lanes, first, count), hides = edge || rule.hides();
    if (edge) hide_outside(lanes, first, count, tiles.scores);
    if (dropout) fill_kept(*dropout, lanes, first, count, tiles.kept);
    if (scratch.tbias) load_bias_tangent(given.bias, rule, lanes, first, count, scratch.tbias);
    const Vec<A> unit = broadcast(rule.plain ? rule.scale : A(1)), scale = broadcast(rule.scale),
                 inverse = broadcast(rule.softcap_inverse);
    if (hides || softcap || dropout || scratch.tbias)
        gradient_tangent_tile<kPacked, T, true>({scratch, unit, scale, inverse, softcap, dropout != nullptr}, query_tile,
                                                tangents, count);
    else
        gradient_tangent_tile<kPacked, T, false>({scratch, unit, scale, inverse, false, false}, query_tile, tangents, count);
    return hides;
}

// The whole step: adds to the tangents of dk and dv (tile.dk, tile.dv) and of dq, laid out as in add_gradients().
template <class T>
static void add_gradient_tangents(const Tangents& given, const GradientQueryTile<T>& query_tile,
                                  const TangentOperands<T>& tangents, const GradientKeyTile<T>& tile,
                                  const TangentKeyOperands<T>& tkeys, HeadDims dims, const ScoreRule<Acc<T>>& rule,
                                  const DropoutMask* dropout, const GradientTangentScratch<T>& scratch, Acc<T>* dq) {
    using A = Acc<T>;
    using E = Element<T>;
    const bool hides = score_gradient_tangents<true>(given, query_tile, tangents, tile, tkeys, dims, rule, dropout, scratch);
    const int64_t width = query_tile.lanes.width, row = width / kValuesPerElement<T>,
                  queries = elements_for<T>(query_tile.lanes.rows);
    const int64_t width_k = round_up(dims.qk, kLanes<A>), width_v = round_up(dims.v, kLanes<A>);
    const auto add_to_keys = [&](const E* weights, const E* values, int64_t channels, A* to) {
        multiply_masked<Weights::a, E>(
            {tile.count, channels, queries, weights, row, 1, values, channels, to, channels, Start::add, nullptr}, hides);
    };
    const auto add_to_queries = [&](const Operand<E>& values, const E* weights) {
        multiply_masked<Weights::b, E>({dims.qk, width, elements_for<T>(tile.count), values.data, 1, values.stride, weights,
                                        width, dq, width, Start::add, nullptr},
                                       hides || (kPaired<T> && tile.count % 2 != 0));
    };
    add_to_keys(scratch.tangent.p_rows, query_tile.dout_rows, width_v, tile.dv);
    if (tangents.dout_rows) add_to_keys(scratch.gradient.p_rows, tangents.dout_rows, width_v, tile.dv);
    add_to_keys(scratch.tangent.ds_rows, query_tile.q_rows, width_k, tile.dk);
    if (tangents.q_rows) add_to_keys(scratch.gradient.ds_rows, tangents.q_rows, width_k, tile.dk);
    add_to_queries(tile.k_elements, scratch.tangent.ds_pairs);
    if (tkeys.k_elements.data) add_to_queries(tkeys.k_elements, scratch.gradient.ds_pairs);
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
