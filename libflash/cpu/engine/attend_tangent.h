// One step of the tangent of forward: a query tile attends to a key tile, and so do the tangents. Layouts as in attend.h. A name
// with the prefix t is a tangent; ts are the tangents of the scores of a row.
//
//     acc += P V     tacc += (P (ts - pivot)) V + P tV     r += rowsum(P (ts - pivot))
//
// The pivot is a constant of a row. The result does not depend on it: once the sums are divided by the row sum, the tangent of
// LSE is mu = pivot + r, and the tangent of the output is tacc - r acc (forward_tangent.h). The pivot is the mean of ts, weighted
// with P, over the first key tile in which the row sees a key. It keeps P (ts - pivot) small, so that rounding to 16 bits loses
// little.
#pragma once

#include "cpu/engine/attend.h"
#include "cpu/engine/gradient.h"
#include "problem/tangent.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// Which inputs have tangents.
struct TangentInputs {
    bool q, k, v, bias;
    bool scores;  // whether ts - mu may differ from 0: also if only the sink has a tangent, since mu depends on it

    FLASH_INLINE explicit TangentInputs(const TangentProblem& p)
        : q(p.tangents.q.present), k(p.tangents.k.present), v(p.tangents.v.present), bias(p.tangents.bias.present),
          scores(p.moves_scores()) {}
};

// A query tile with sums of tangents. tile.o holds acc (unless LSE and out are given: from_lse), tacc, and r as one more channel,
// so that rescaling and blocked sums treat all of them in the same way.
template <class T>
struct TangentQueryTile {
    using A = Acc<T>;
    QueryTile<T> tile;
    Element<T>* tq = nullptr;                // [channel or pair][lane]
    A *pivot = nullptr, *started = nullptr;  // started: 1 for lanes whose pivot is set, else 0
    A *lse = nullptr, *mu = nullptr;         // LSE: with from_lse as given, +infinity for rows without a visible key; its tangent
    bool all_started = false;

    void lay_out(Arena& arena, HeadDims dims, bool from_lse, int64_t most_keys, int64_t width) {
        tile.lay_out(arena, {dims.qk, channels(dims, from_lse)}, most_keys, width);
        tq = arena.allocate<Element<T>>(elements_for<T>(dims.qk) * width);
        pivot = arena.allocate<A>(kQueryTileRows);
        started = arena.allocate<A>(kQueryTileRows);
        lse = arena.allocate<A>(kQueryTileRows);
        mu = arena.allocate<A>(kQueryTileRows);
    }
    static int64_t channels(HeadDims dims, bool from_lse) { return (from_lse ? 1 : 2) * dims.v + 1; }

    void start() {
        for (int64_t i = 0; i < tile.lanes.width; ++i) pivot[i] = started[i] = 0;
        all_started = false;
    }
};

// Keys first to first + count - 1, with the operands that have tangents.
template <class T>
struct TangentKeyTile {
    KeyTile<T> tile;
    Operand<Element<T>> tk, tv;
};

template <class T>
struct TangentTileScratch {
    using A = Acc<T>;
    A *scores = nullptr, *tscores = nullptr;
    A *additive = nullptr, *tbias = nullptr, *slope = nullptr, *kept = nullptr;
    Element<T>*p = nullptr, *tp = nullptr;

    void lay_out(Arena& arena, const TangentProblem& problem, int64_t tile_k, int64_t width) {
        const int64_t tile = tile_k * width;
        scores = arena.allocate<A>(tile);
        tscores = arena.allocate<A>(tile);
        if (problem.bias.present || problem.mask.present) additive = arena.allocate<A>(tile);
        if (problem.tangents.bias.present) tbias = arena.allocate<A>(tile);
        if (problem.softcap > 0) slope = arena.allocate<A>(tile);
        if (problem.dropout.active()) kept = arena.allocate<A>(tile);
        p = tp = nullptr;
        if constexpr (kPaired<T>) {
            p = arena.allocate<Element<T>>(elements_for<T>(tile_k) * width);
            tp = arena.allocate<Element<T>>(elements_for<T>(tile_k) * width);
        }
    }
};

// to = a tb^T + ta b^T, without the terms whose tangent is absent; 0 if both are absent. For scores: K tQ^T + tK Q^T.
template <class T>
static void multiply_tangents(const Operand<Element<T>>& a, const Element<T>* tb, const Operand<Element<T>>& ta,
                              const Element<T>* b, int64_t count, int64_t width, int64_t channels, Acc<T>* to) {
    using E = Element<T>;
    const int64_t depth = elements_for<T>(channels);
    Start start = Start::zero;
    if (tb) {
        multiply<E>({count, width, depth, a.data, a.stride, 1, tb, width, to, width, start, nullptr});
        start = Start::add;
    }
    if (ta.data) {
        multiply<E>({count, width, depth, ta.data, ta.stride, 1, b, width, to, width, start, nullptr});
        start = Start::add;
    }
    if (start == Start::zero) std::memset(static_cast<void*>(to), 0, static_cast<size_t>(count * width) * sizeof(Acc<T>));
}

// The tangent of bias as a tile [key][lane].
template <class A>
static void load_bias_tangent(const ScoreTensor& tbias, const ScoreRule<A>& rule, const Lanes<A>& lanes, int64_t first,
                              int64_t count, A* to) {
    ScoreRule<A> only;
    only.bias = &tbias, only.batch = rule.batch, only.head = rule.head;
    load_additive_mask(only, lanes, first, count, to);
}

// Tangents of the scores from those of the products, in place; 0 where the key is hidden.
template <class A>
static void make_score_tangents(A scale, const A* scores, const A* slope, const A* tbias, int64_t elements, bool hides, A* ts) {
    const Vec<A> factor = broadcast(scale);
    for (int64_t at = 0; at < elements; at += kLanes<A>) {
        Vec<A> t = load(ts + at) * factor;
        if (slope) t *= load(slope + at);
        if (tbias) t += load(tbias + at);
        if (hides) t = load(scores + at) == -kInfinity<A> ? Vec<A>{} : t;
        store(ts + at, t);
    }
}

// exp(score - LSE) in place. The exact exponent is at most 0; LSE is rounded.
template <class A>
static void probabilities_from_lse(const A* lse, A scale, int64_t count, int64_t width, A* scores) {
    const Vec<A> factor = broadcast(scale);
    for (int64_t i = 0; i < width; i += kLanes<A>) {
        const Vec<A> row_lse = load(lse + i);
        for (int64_t j = 0; j < count; ++j) {
            A* at = scores + j * width + i;
            const Vec<A> s = load(at), p = exp<A>(minimum(Vec<A>{}, multiply_add(s, factor, -row_lse)));
            store(at, s == -kInfinity<A> ? Vec<A>{} : p);  // LSE may be NaN
        }
    }
}

// Sets the pivots of rows that see their first keys.
template <class T>
static void choose_pivots(TangentQueryTile<T>& query_tile, const Acc<T>* p, const Acc<T>* ts, int64_t count) {
    using A = Acc<T>;
    const int64_t width = query_tile.tile.lanes.width;
    query_tile.all_started = true;
    for (int64_t i = 0; i < width; i += kLanes<A>) {
        Vec<A> sum{}, weighted{};
        for (int64_t j = 0; j < count; ++j) {
            const Vec<A> weight = load(p + j * width + i);
            sum += weight;
            weighted = multiply_add(weight, load(ts + j * width + i), weighted);
        }
        const Vec<A> before = load(query_tile.started + i);
        const Vec<A> pivot = before == 0 ? (sum == 0 ? Vec<A>{} : weighted / sum) : load(query_tile.pivot + i);
        const Vec<A> now = sum == 0 ? before : broadcast<A>(1);
        store(query_tile.pivot + i, pivot);
        store(query_tile.started + i, now);
    }
    for (int64_t i = 0; i < query_tile.tile.lanes.rows; ++i) query_tile.all_started &= query_tile.started[i] != 0;
}

// Replaces ts by p (ts - pivot) and adds to r. `rescale`: nullptr for 1.
template <class T>
static void weigh_tangents(TangentQueryTile<T>& query_tile, const Acc<T>* p, Acc<T>* ts, int64_t count, const Acc<T>* rescale,
                           Acc<T>* r) {
    using A = Acc<T>;
    const int64_t width = query_tile.tile.lanes.width;
    if (!query_tile.all_started) choose_pivots(query_tile, p, ts, count);
    for (int64_t i = 0; i < width; i += kLanes<A>) {
        const Vec<A> pivot = load(query_tile.pivot + i);
        Vec<A> sum{};
        for (int64_t j = 0; j < count; ++j) {
            const int64_t at = j * width + i;
            const Vec<A> weighted = load(p + at) * (load(ts + at) - pivot);
            store(ts + at, weighted);
            sum += weighted;
        }
        if (!query_tile.tile.empty) sum += load(r + i) * (rescale ? load(rescale + i) : broadcast<A>(1));
        store(r + i, sum);
    }
}

// Sets dropped elements to 0.
template <class A>
static void drop_by(const A* kept, int64_t elements, A* tile) {
    for (int64_t at = 0; at < elements; at += kLanes<A>) store(tile + at, load(kept + at) == 0 ? Vec<A>{} : load(tile + at));
}

template <class T>
class TangentStep {
    using A = Acc<T>;
    using E = Element<T>;

public:
    const TangentProblem& problem;
    const HeadDims dims;
    const ScoreRule<A>& rule;
    const DropoutMask* dropout;
    const TangentTileScratch<T>& scratch;

    void attend(TangentQueryTile<T>& query_tile, const TangentKeyTile<T>& keys) const {
        const TangentInputs inputs(problem);
        QueryTile<T>& tile = query_tile.tile;
        const int64_t width = tile.lanes.width, count = keys.tile.count;
        const bool hides = make_tile(inputs, query_tile, keys);
        const A unit = rule.plain ? rule.scale : A(1);
        if (problem.from_lse)
            probabilities_from_lse(query_tile.lse, unit, count, width, scratch.scores);
        else
            softmax_tile<T, true>(tile.softmax, scratch.scores, count, width, score_unit(rule), nullptr);
        const A* rescale = problem.from_lse ? nullptr : tile.softmax.rescale;
        A* r = sums(query_tile, 1);
        if (inputs.scores)
            weigh_tangents(query_tile, scratch.scores, scratch.tscores, count, rescale, r);
        else if (tile.empty)
            std::memset(static_cast<void*>(r), 0, static_cast<size_t>(width) * sizeof(A));
        add_products(inputs, query_tile, keys, rescale, hides || (kPaired<T> && count % 2 != 0));
        tile.empty = false;
    }

    // The parts of tile.o: acc; tacc, in place of acc with from_lse; r = sums(query_tile, 1).
    A* acc(TangentQueryTile<T>& query_tile) const { return query_tile.tile.o; }
    A* tacc(TangentQueryTile<T>& query_tile) const {
        return query_tile.tile.o + (problem.from_lse ? 0 : dims.v) * query_tile.tile.lanes.width;
    }
    A* sums(TangentQueryTile<T>& query_tile, int64_t after_tacc) const {
        return tacc(query_tile) + after_tacc * dims.v * query_tile.tile.lanes.width;
    }

private:
    // Scores and their tangents; returns whether keys are hidden.
    bool make_tile(const TangentInputs& inputs, const TangentQueryTile<T>& query_tile, const TangentKeyTile<T>& keys) const {
        const QueryTile<T>& tile = query_tile.tile;
        const Lanes<A>& lanes = tile.lanes;
        const int64_t width = lanes.width, count = keys.tile.count, first = keys.tile.first;
        multiply<E>({count, width, elements_for<T>(dims.qk), keys.tile.k.data, keys.tile.k.stride, 1, tile.q, width,
                     scratch.scores, width, Start::zero, nullptr});
        if (inputs.scores)
            multiply_tangents<T>(keys.tile.k, inputs.q ? query_tile.tq : nullptr, keys.tk, tile.q, count, width, dims.qk,
                                 scratch.tscores);
        A* slope = rule.softcap != 0 ? scratch.slope : nullptr;
        if (!rule.plain) make_scores<A>(rule, lanes, first, count, scratch.scores, scratch.additive, slope);
        const bool edge = is_edge_tile(lanes, first, count), hides = edge || rule.hides();
        if (edge) hide_outside(lanes, first, count, scratch.scores);
        if (inputs.bias) load_bias_tangent(problem.tangents.bias, rule, lanes, first, count, scratch.tbias);
        if (inputs.scores)
            make_score_tangents<A>(rule.scale, scratch.scores, slope, inputs.bias ? scratch.tbias : nullptr, count * width, hides,
                                   scratch.tscores);
        return hides;
    }

    void add_products(const TangentInputs& inputs, TangentQueryTile<T>& query_tile, const TangentKeyTile<T>& keys,
                      const A* rescale, bool hides) const {
        const QueryTile<T>& tile = query_tile.tile;
        const int64_t width = tile.lanes.width, count = keys.tile.count;
        if (dropout) {
            fill_kept(*dropout, tile.lanes, keys.tile.first, count, scratch.kept);
            drop_by(scratch.kept, count * width, scratch.scores);
            if (inputs.scores) drop_by(scratch.kept, count * width, scratch.tscores);
        }
        E *p = scratch.p, *tp = scratch.tp;
        if constexpr (kPaired<T>) {
            pack_probabilities<T>(scratch.scores, count, width, p);
            if (inputs.scores) pack_probabilities<T>(scratch.tscores, count, width, tp);
        } else {
            p = scratch.scores, tp = scratch.tscores;
        }
        const Start start = tile.empty ? Start::zero : rescale ? Start::scaled : Start::add;
        const auto add = [&](const Operand<E>& v, const E* weights, A* to, Start how) {
            multiply_masked<Weights::b, E>(
                {dims.v, width, elements_for<T>(count), v.data, 1, v.stride, weights, width, to, width, how, rescale}, hides);
        };
        A* to = tacc(query_tile);
        if (!problem.from_lse) add(keys.tile.v, p, acc(query_tile), start);
        if (inputs.scores) add(keys.tile.v, tp, to, start);
        if (inputs.v) add(keys.tv, p, to, inputs.scores ? Start::add : start);
        if (!inputs.scores && !inputs.v && tile.empty)
            std::memset(static_cast<void*>(to), 0, static_cast<size_t>(dims.v * width) * sizeof(A));
    }
};

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
