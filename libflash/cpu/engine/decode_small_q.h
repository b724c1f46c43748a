// Decode with at most kSmallQRows query rows per key head. With one query row per lane most lanes would be idle, and the time is
// that of reading the cache. So vectors run along the channels here, and the heads of a few keys are processed before the next
// keys, so that the cache is read in memory order. Scores are stored as [row][key], outputs as [row][channel].
#pragma once

#include "cpu/cancel.h"
#include "cpu/engine/attend.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kSmallQRows = 8;
constexpr int64_t kSmallQKeys = 128;   // keys of a tile
constexpr int64_t kSmallQValues = 16;  // keys whose values are processed for one head before the next head

// The element type of the products with K: bf16 pairs if there is a dot product for them, else the accumulator type.
template <class T>
struct SmallQElementOf {
    using type = Acc<T>;
};
#if FLASH_BF16_DOT
template <>
struct SmallQElementOf<bfloat16> {
    using type = bfloat16;
};
FLASH_INLINE U32 load_channels(const bfloat16* p, int64_t left) { return load_pairs(p, 0, left); }
FLASH_INLINE U32 load_channels(const bfloat16* p) {
    U32 pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return pairs;
}
#endif
template <class T>
using SmallQElement = typename SmallQElementOf<T>::type;
template <class T>
constexpr int kStepChannels = kValuesPerElement<T> * kLanes<Acc<T>>;
template <class T>
FLASH_INLINE auto load_channels(const T* p, int64_t left) {
    return load_part(p, left);
}
template <class T>
FLASH_INLINE auto load_channels(const T* p) {
    return load_wide(p);
}
template <class T>
FLASH_INLINE int64_t small_q_stride(int64_t channels) {
    return round_up(channels, kLanes<Acc<T>>);
}

// The query rows of neighbouring key heads: operands, scores and softmax state.
template <class T>
struct SmallQScratch {
    int64_t heads = 0, rows = 0;  // rows: per head
    int64_t q_stride = 0, o_stride = 0;
    QueryTile<T>* query_tiles = nullptr;  // one per head; q is not used, o is [row][channel]
    SmallQElement<T>* q = nullptr;        // [head][row][channel], padded with zeros to whole steps
    Acc<T>* scores = nullptr;             // [head][row][key]

    void lay_out(Arena& arena, HeadDims dims, int64_t most_keys, int64_t most_heads, int64_t rows_of_head) {
        heads = most_heads, rows = rows_of_head;
        q_stride = round_up(dims.qk, kStepChannels<T>), o_stride = small_q_stride<T>(dims.v);
        query_tiles = arena.allocate<QueryTile<T>>(heads);
        q = arena.allocate<SmallQElement<T>>(heads * rows * q_stride);
        scores = arena.allocate<Acc<T>>(heads * rows * kSmallQKeys);
        for (int64_t head = 0; head < heads; ++head) {
            QueryTile<T> query_tile;
            query_tile.lanes.lay_out(arena);
            query_tile.softmax.lay_out(arena);
            query_tile.o = arena.allocate<Acc<T>>(rows * o_stride);
            query_tile.totals.lay_out(arena, most_keys, rows * o_stride);
            if (query_tiles) query_tiles[head] = query_tile;
        }
    }
    template <class Rows>
    void load_queries(const Rows& from, int64_t head, HeadDims dims) {
        for (int64_t r = 0; r < rows; ++r) {
            const T* row = from(r);
            SmallQElement<T>* to = q + (head * rows + r) * q_stride;
            for (int64_t c = 0; c < q_stride; ++c) {
                if constexpr (kPaired<T>)
                    to[c] = c < dims.qk ? row[c] : T{};
                else
                    to[c] = c < dims.qk ? widen(row[c]) : 0;
            }
        }
        query_tiles[head].start();
    }
};

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

// scores[r][j] = q_r . k_j for `Count` rows and as many keys as a vector has lanes. Four keys at a time share each load of q.
// Scores from `count` on are undefined.
template <int Count, class T>
static void small_q_products(const T* const* k, int64_t head, int64_t count, int64_t channels, const SmallQElement<T>* q,
                             int64_t q_stride, Acc<T>* scores) {
    using A = Acc<T>;
    constexpr int L = kLanes<A>, S = kStepChannels<T>, Keys = L < 4 ? L : 4;
    Vec<A> sums[Count][L];
    for (int j = 0; j < L; j += Keys) {
        const T* row[Keys];
        for (int n = 0; n < Keys; ++n) row[n] = k[j + n < count ? j + n : count - 1] + head;
        Vec<A> sum[Count][Keys] = {};
        const auto step = [&](int64_t c, auto load_key) __attribute__((always_inline)) {
            decltype(load_key(row[0])) x[Keys];
            FLASH_UNROLL
            for (int n = 0; n < Keys; ++n) x[n] = load_key(row[n] + c);
            FLASH_UNROLL
            for (int r = 0; r < Count; ++r) {
                const auto y = load_channels(q + r * q_stride + c);
                FLASH_UNROLL
                for (int n = 0; n < Keys; ++n) sum[r][n] = dot_step(x[n], y, sum[r][n]);
            }
        };
        int64_t c = 0;
        for (; c + S <= channels; c += S) step(c, [](const T* p) __attribute__((always_inline)) { return load_channels(p); });
        if (c < channels)
            step(c, [left = channels - c](const T* p) __attribute__((always_inline)) { return load_channels(p, left); });
        FLASH_UNROLL
        for (int r = 0; r < Count; ++r) {
            FLASH_UNROLL
            for (int n = 0; n < Keys; ++n) sums[r][j + n] = sum[r][n];
        }
    }
    FLASH_UNROLL
    for (int r = 0; r < Count; ++r) store(scores + r * kSmallQKeys, sum_each<A>(sums[r]));
}

// o[r][c] = o[r][c] * rescale[r] + sum_j p[r][j] v_j[c] for `Count` rows and `Vectors` vectors of channels.
template <int Count, int Vectors, class T>
FLASH_INLINE void small_q_output_block(const T* const* v, int64_t head, int64_t count, int64_t c, int64_t channels,
                                       const Acc<T>* p, Acc<T>* o, int64_t o_stride, const Acc<T>* rescale, Start start) {
    using A = Acc<T>;
    constexpr int L = kLanes<A>;
    Vec<A> sum[Count][Vectors];
    FLASH_UNROLL
    for (int r = 0; r < Count; ++r) {
        FLASH_UNROLL
        for (int n = 0; n < Vectors; ++n) sum[r][n] = Vec<A>{};
    }
    for (int64_t j = 0; j < count; ++j) {
        const T* row = v[j] + head + c;
        Vec<A> x[Vectors];
        FLASH_UNROLL
        for (int n = 0; n < Vectors; ++n) x[n] = Vectors == 1 ? load_part(row, channels - c) : load_wide(row + n * L);
        FLASH_UNROLL
        for (int r = 0; r < Count; ++r) {
            const Vec<A> weight = broadcast(p[r * kSmallQKeys + j]);
            FLASH_UNROLL
            for (int n = 0; n < Vectors; ++n) sum[r][n] = multiply_add(weight, x[n], sum[r][n]);
        }
    }
    FLASH_UNROLL
    for (int r = 0; r < Count; ++r) {
        FLASH_UNROLL
        for (int n = 0; n < Vectors; ++n) {
            A* at = o + r * o_stride + c + n * L;
            if (start != Start::zero)
                sum[r][n] = multiply_add(load(at), broadcast(start == Start::scaled ? rescale[r] : A(1)), sum[r][n]);
            store(at, sum[r][n]);
        }
    }
}

template <int Count, class T>
static void small_q_output(const T* const* v, int64_t head, int64_t count, int64_t channels, const Acc<T>* p, Acc<T>* o,
                           int64_t o_stride, const Acc<T>* rescale, Start start) {
    constexpr int L = kLanes<Acc<T>>, kMost = kVectorRegisters / 2 / Count;
    int64_t c = 0;
    for (; c + kMost * L <= channels; c += kMost * L)
        small_q_output_block<Count, kMost, T>(v, head, count, c, channels, p, o, o_stride, rescale, start);
    if constexpr (kMost > 4)
        for (; c + 4 * L <= channels; c += 4 * L)
            small_q_output_block<Count, 4, T>(v, head, count, c, channels, p, o, o_stride, rescale, start);
    for (; c < channels; c += L) small_q_output_block<Count, 1, T>(v, head, count, c, channels, p, o, o_stride, rescale, start);
}

// Turns the products of one row into scores; hidden keys become -infinity.
template <class A>
static void small_q_scores(const ScoreRule<A>& rule, const Lanes<A>& lanes, int64_t r, int64_t first, int64_t count, A* scores) {
    using I = Vec<Integer<A>>;
    const ScaleAndCap<A> scale_and_cap(rule);
    const I from = broadcast(lanes.first_key[r]), to = broadcast(lanes.last_key[r]);
    for (int64_t j = 0; j < count; j += kLanes<A>) {
        const I key = lane_numbers<Integer<A>>() + static_cast<Integer<A>>(first + j);
        Vec<A> z = load(scores + j);
        if (!rule.plain) {
            z = scale_and_cap.apply(z, nullptr);
            if (rule.alibi)
                z -= broadcast(lanes.alibi_slope[r]) *
                     magnitude(broadcast(lanes.alibi_position[r]) - __builtin_convertvector(key, Vec<A>));
        }
        store(scores + j, ((from <= key) & (key < to)) ? z : broadcast<A>(-kInfinity<A>));
    }
}

// before * rescale + the sum of p, in the order in which small_q_output sums p * v: if all values are 1, so is the output.
static float add_as_output(const float* p, int64_t count, float before, float rescale) {
    float parts[kSmallQKeys / kSmallQValues] = {};
    const int64_t whole = count / kSmallQValues;
    for (int64_t j = 0; j < kSmallQValues; ++j)
        for (int64_t part = 0; part < whole; ++part) parts[part] += p[part * kSmallQValues + j];
    for (int64_t j = whole * kSmallQValues; j < count; ++j) parts[whole] += p[j];
    Vec<float> sum = multiply_add(broadcast(before), broadcast(rescale), broadcast(parts[0]));
    for (int64_t part = 1; part * kSmallQValues < count; ++part) sum += broadcast(parts[part]);
    return sum[0];
}

// The online softmax of one row: replaces scores by probabilities.
template <class T>
static void small_q_softmax(SoftmaxState<Acc<T>>& state, int64_t r, int64_t count, Acc<T> unit, Acc<T>* scores) {
    using A = Acc<T>;
    constexpr int L = kLanes<A>;
    Vec<A> largest = broadcast(state.row_max[r]);
    for (int64_t j = 0; j < count; j += L) largest = maximum(load(scores + j), largest);
    A new_max = largest[0];
    for (int i = 1; i < L; ++i) new_max = largest[i] > new_max ? largest[i] : new_max;
    const Vec<A> shift = finite_maximum<A>(broadcast(new_max)), factor = broadcast(unit);
    const A rescale = exp2<A>((broadcast(state.row_max[r]) - shift) * factor)[0];
    Vec<A> sum{};
    for (int64_t j = 0; j < count; j += L) {
        const Vec<A> p = exp2<A>((load(scores + j) - shift) * factor);
        sum += p;
        store(scores + j, p);
    }
    state.row_max[r] = new_max;
    if constexpr (std::is_same_v<T, float>)
        state.row_sum[r] = add_as_output(scores, count, state.row_sum[r], rescale);
    else
        state.row_sum[r] = state.row_sum[r] * rescale + sum_of_lanes<A>(sum);
    state.rescale[r] = rescale;
}

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

// Addresses of the rows of a key tile for the first head, and the distance to the next head.
template <class T>
struct SmallQKeyTile {
    int64_t first = 0, count = 0;
    const T *k[kSmallQKeys], *v[kSmallQKeys];
    int64_t k_head = 0, v_head = 0;

    template <class Rows>
    void find(const Rows& k_rows, const Rows& v_rows, int64_t key, int64_t last) {
        first = key, count = last - key < kSmallQKeys ? last - key : kSmallQKeys;
        for (int64_t j = 0; j < count; ++j) k[j] = k_rows(first + j), v[j] = v_rows(first + j);
    }
};

// Prefetches `step` rows from row `j` on into the L2 cache.
template <class T>
FLASH_INLINE void prefetch_rows(const T* const* rows, int64_t j, int64_t count, int64_t step, int64_t head, int64_t channels) {
    const int64_t end = j + step < count ? j + step : count, bytes = channels * static_cast<int64_t>(sizeof(T));
    for (; j < end; ++j) {
        const char* at = reinterpret_cast<const char*>(rows[j] + head);
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(at + byte, 0, 2);
    }
}

template <class T>
static void small_q_attend(const SmallQScratch<T>& scratch, const SmallQKeyTile<T>& tile, const SmallQKeyTile<T>& next,
                           HeadDims dims, const ScoreRule<Acc<T>>& rule) {
    constexpr int64_t L = kLanes<Acc<T>>;
    const int64_t rows = scratch.rows;
    for (int64_t j = 0; j < tile.count; j += L)
        for (int64_t head = 0; head < scratch.heads; ++head) {
            if (j + L < tile.count)
                prefetch_rows(tile.k, j + L, tile.count, L, head * tile.k_head, dims.qk);
            else
                prefetch_rows(tile.v, 0, tile.count, kSmallQValues, head * tile.v_head, dims.v);
            for_row_blocks(rows, [&](auto block, int64_t r) __attribute__((always_inline)) {
                const int64_t row = head * rows + r;
                small_q_products<decltype(block)::value, T>(tile.k + j, head * tile.k_head, tile.count - j, dims.qk,
                                                            scratch.q + row * scratch.q_stride, scratch.q_stride,
                                                            scratch.scores + row * kSmallQKeys + j);
            });
        }
    for (int64_t head = 0; head < scratch.heads; ++head)
        for (int64_t r = 0; r < rows; ++r) {
            Acc<T>* scores = scratch.scores + (head * rows + r) * kSmallQKeys;
            small_q_scores(rule, scratch.query_tiles[head].lanes, r, tile.first, tile.count, scores);
            small_q_softmax<T>(scratch.query_tiles[head].softmax, r, tile.count, score_unit(rule), scores);
        }
    for (int64_t j = 0; j < tile.count; j += kSmallQValues)
        for (int64_t head = 0; head < scratch.heads; ++head) {
            if (j + kSmallQValues < tile.count)
                prefetch_rows(tile.v, j + kSmallQValues, tile.count, kSmallQValues, head * tile.v_head, dims.v);
            else
                prefetch_rows(next.k, 0, next.count, L, head * next.k_head, dims.qk);
            const QueryTile<T>& query_tile = scratch.query_tiles[head];
            const int64_t left = tile.count - j < kSmallQValues ? tile.count - j : kSmallQValues;
            const Start start = j > 0 ? Start::add : query_tile.empty ? Start::zero : Start::scaled;
            for_row_blocks(rows, [&](auto block, int64_t r) __attribute__((always_inline)) {
                small_q_output<decltype(block)::value, T>(
                    tile.v + j, head * tile.v_head, left, dims.v, scratch.scores + (head * rows + r) * kSmallQKeys + j,
                    query_tile.o + r * scratch.o_stride, scratch.o_stride, query_tile.softmax.rescale + r, start);
            });
        }
    for (int64_t head = 0; head < scratch.heads; ++head) scratch.query_tiles[head].empty = false;
}

// Loops over all visible keys, which are the same for each head. k and v are the rows of the first head.
template <class T, class Rows>
static void small_q_loop_over_keys(const SmallQScratch<T>& scratch, const Rows& k, const Rows& v, int64_t k_head, int64_t v_head,
                                   HeadDims dims, const ScoreRule<Acc<T>>& rule) {
    const KeyRange visible = scratch.query_tiles[0].lanes.seen_by_any;
    SmallQKeyTile<T> tiles[2];
    for (SmallQKeyTile<T>& tile : tiles) tile.k_head = k_head, tile.v_head = v_head;
    int current = 0;
    if (!visible.empty()) tiles[current].find(k, v, visible.first, visible.last);
    for (int64_t key = visible.first; key < visible.last; key += kSmallQKeys, current ^= 1) {
        cancellation_point();
        SmallQKeyTile<T>& next = tiles[current ^ 1];
        next.count = 0;
        for (int64_t head = 0; head < scratch.heads; ++head)
            add_finished_block(scratch.query_tiles[head], key, dims.v, scratch.o_stride, score_unit(rule));
        if (key + kSmallQKeys < visible.last) next.find(k, v, key + kSmallQKeys, visible.last);
        small_q_attend(scratch, tiles[current], next, dims, rule);
    }
}

template <class T, class Rows>
static void small_q_store(const QueryTile<T>& query_tile, HeadDims dims, const Rows& out) {
    using A = Acc<T>;
    const int64_t stride = small_q_stride<T>(dims.v);
    for (int64_t r = 0; r < query_tile.lanes.rows; ++r) {
        const A factor = query_tile.softmax.rescale[r];
        T* to = out(r);
        for (int64_t c = 0; c < dims.v; c += kLanes<A>) {
            const Vec<A> o = query_tile.empty || factor == 0 ? Vec<A>{} : load(query_tile.o + r * stride + c) * broadcast(factor);
            store_part(to + c, o, dims.v - c);
        }
    }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
