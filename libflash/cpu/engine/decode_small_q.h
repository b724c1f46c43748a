// Decode with at most kSmallQRows query rows per key head. With one query row per lane most lanes would be idle, and the time is
// that of reading the cache. So vectors run along the channels here, and the heads of a few keys are processed before the next
// keys, so that the cache is read in memory order. Scores are stored as [row][key], outputs as [row][channel].
#pragma once

#include "cpu/cancel.h"
#include "cpu/engine/decode_parts.h"

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
// The channels of a key, from a cache of type C, as operands of a product with queries of type T.
template <class T, class C>
FLASH_INLINE auto load_key(const C* p, int64_t left) {
    if constexpr (std::is_same_v<C, T>) return load_channels(p, left);
#if FLASH_BF16_DOT
    else if constexpr (kPaired<T>)
        return load_code_pairs_part(p, left);
#endif
    else
        return load_cached_part<Acc<T>>(p, left);
}
template <class T, class C>
FLASH_INLINE auto load_key(const C* p) {
    if constexpr (std::is_same_v<C, T>) return load_channels(p);
#if FLASH_BF16_DOT
    else if constexpr (kPaired<T>)
        return load_code_pairs(p);
#endif
    else
        return load_cached<Acc<T>>(p);
}

// Elements of a row of queries and of the output: each part padded to whole steps or vectors.
template <class T>
FLASH_INLINE int64_t small_q_part(int64_t channels) {
    return round_up(channels, kStepChannels<T>);
}
template <class T>
FLASH_INLINE int64_t small_q_stride(const KeyParts& parts) {
    return parts.v_groups * round_up(parts.v_group_size, kLanes<Acc<T>>);
}

// The query rows of neighbouring key heads: operands, scores and softmax state.
template <class T>
struct SmallQScratch {
    int64_t heads = 0, rows = 0;  // rows: per head
    int64_t q_stride = 0, o_stride = 0;
    QueryTile<T>* query_tiles = nullptr;  // one per head; q is not used, o is [row][channel]
    SmallQElement<T>* q = nullptr;        // [head][row][channel], padded with zeros to whole steps
    Acc<T>* scores = nullptr;             // [head][row][key]
    Acc<T>* k_scales = nullptr;           // [head][group][key], with parts
    KeyParts parts;

    void lay_out(Arena& arena, const KeyParts& parts_of_keys, int64_t most_keys, int64_t most_heads, int64_t rows_of_head) {
        heads = most_heads, rows = rows_of_head, parts = parts_of_keys;
        q_stride = parts.groups * small_q_part<T>(parts.group_size) + small_q_part<T>(parts.rope_dim);
        o_stride = small_q_stride<T>(parts);
        query_tiles = arena.allocate<QueryTile<T>>(heads);
        q = arena.allocate<SmallQElement<T>>(heads * rows * q_stride);
        scores = arena.allocate<Acc<T>>(heads * rows * kSmallQKeys);
        if (!parts.plain) k_scales = arena.allocate<Acc<T>>(heads * parts.groups * kSmallQKeys);
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
    void load_queries(const Rows& from, int64_t head) {
        for (int64_t r = 0; r < rows; ++r) {
            SmallQElement<T>* to = q + (head * rows + r) * q_stride;
            for (int64_t part = 0; part < parts.count(); ++part) {
                load_part_of_query(from(r) + parts.first_channel(part), parts.size(part), to);
                to += small_q_part<T>(parts.size(part));
            }
        }
        query_tiles[head].start();
    }
    static void load_part_of_query(const T* row, int64_t channels, SmallQElement<T>* to) {
        for (int64_t c = 0; c < small_q_part<T>(channels); ++c) {
            if constexpr (kPaired<T>)
                to[c] = c < channels ? row[c] : T{};
            else
                to[c] = c < channels ? widen(row[c]) : 0;
        }
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
template <int Count, class T, class C>
static void small_q_products(const C* const* k, int64_t head, int64_t count, int64_t channels, const SmallQElement<T>* q,
                             int64_t q_stride, Acc<T>* scores, int64_t scores_stride) {
    using A = Acc<T>;
    constexpr int L = kLanes<A>, S = kStepChannels<T>, Keys = L < 4 ? L : 4;
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

// o[r][c] = o[r][c] * rescale[r] + sum_j p[r][j] v_j[c] for `Count` rows and `Vectors` vectors of channels.
template <int Count, int Vectors, class T, class C>
FLASH_INLINE void small_q_output_block(const C* const* v, int64_t head, int64_t count, int64_t c, int64_t channels,
                                       const Acc<T>* p, int64_t p_stride, Acc<T>* o, int64_t o_stride, const Acc<T>* rescale,
                                       Start start) {
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
        FLASH_UNROLL
        for (int n = 0; n < Vectors; ++n)
            x[n] = Vectors == 1 ? load_cached_part<A>(row, channels - c) : load_cached<A>(row + n * L);
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
            if (start != Start::zero)
                sum[r][n] = multiply_add(load(at), broadcast(start == Start::scaled ? rescale[r] : A(1)), sum[r][n]);
            store(at, sum[r][n]);
        }
    }
}

template <int Count, class T, class C>
static void small_q_output(const C* const* v, int64_t head, int64_t count, int64_t channels, const Acc<T>* p, int64_t p_stride,
                           Acc<T>* o, int64_t o_stride, const Acc<T>* rescale, Start start) {
    constexpr int L = kLanes<Acc<T>>, kMost = kVectorRegisters / 2 / Count;
    int64_t c = 0;
    for (; c + kMost * L <= channels; c += kMost * L)
        small_q_output_block<Count, kMost, T>(v, head, count, c, channels, p, p_stride, o, o_stride, rescale, start);
    if constexpr (kMost > 4)
        for (; c + 4 * L <= channels; c += 4 * L)
            small_q_output_block<Count, 4, T>(v, head, count, c, channels, p, p_stride, o, o_stride, rescale, start);
    for (; c < channels; c += L)
        small_q_output_block<Count, 1, T>(v, head, count, c, channels, p, p_stride, o, o_stride, rescale, start);
}

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

// Addresses of the rows of a key tile for the first head, and the distance to the next head. The rope parts and the scales are
// found only if the call has parts.
template <class T, class C>
struct SmallQKeyTile {
    int64_t first = 0, count = 0;
    const C *k[kSmallQKeys], *v[kSmallQKeys];
    const T* k_rope[kSmallQKeys];
    const float *k_scale[kSmallQKeys], *v_scale[kSmallQKeys];
    int64_t k_head = 0, v_head = 0, rope_head = 0, k_scale_head = 0, v_scale_head = 0;
    int64_t k_scale_group = 0, v_scale_group = 0;

    void set_strides(const KvCache& cache) {
        k_head = cache.k.stride[2], v_head = cache.v.stride[2], rope_head = cache.k_rope.stride[2];
        k_scale_head = cache.k_scale.head_stride, v_scale_head = cache.v_scale.head_stride;
        k_scale_group = cache.k_scale.group_stride, v_scale_group = cache.v_scale.group_stride;
    }
    template <class Cached>
    void find(const Cached& cached, const KeyParts& parts, int64_t key, int64_t last) {
        first = key, count = last - key < kSmallQKeys ? last - key : kSmallQKeys;
        for (int64_t j = 0; j < count; ++j) k[j] = cached.k(first + j), v[j] = cached.v(first + j);
        if (parts.plain) return;
        for (int64_t j = 0; j < count; ++j) k_scale[j] = cached.k_scale(first + j), v_scale[j] = cached.v_scale(first + j);
        for (int64_t j = 0; parts.rope_dim > 0 && j < count; ++j) k_rope[j] = cached.k_rope(first + j);
    }
};

// The scales of the keys of a tile; 0 past its last key.
template <class T, class C>
static void load_k_scales(const SmallQScratch<T>& scratch, const SmallQKeyTile<T, C>& tile) {
    for (int64_t head = 0; head < scratch.heads; ++head)
        for (int64_t group = 0; group < scratch.parts.groups; ++group) {
            Acc<T>* to = scratch.k_scales + (head * scratch.parts.groups + group) * kSmallQKeys;
            const int64_t at = head * tile.k_scale_head + group * tile.k_scale_group;
            for (int64_t j = 0; j < kSmallQKeys; ++j) to[j] = j < tile.count ? tile.k_scale[j][at] : 0;
        }
}

// small_q_products() of keys with parts, from key `j` of the tile on: the sum over the parts of scale times product.
template <int Count, class T, class C>
static void small_q_part_products(const SmallQScratch<T>& scratch, const SmallQKeyTile<T, C>& tile, int64_t j, int64_t head,
                                  int64_t row) {
    using A = Acc<T>;
    constexpr int L = kLanes<A>;
    const KeyParts& parts = scratch.parts;
    const SmallQElement<T>* q = scratch.q + row * scratch.q_stride;
    A products[Count * L];
    A* scores = scratch.scores + row * kSmallQKeys + j;
    for (int64_t group = 0; group < parts.groups; ++group, q += small_q_part<T>(parts.group_size)) {
        small_q_products<Count, T, C>(tile.k + j, head * tile.k_head + parts.first_channel(group), tile.count - j,
                                      parts.group_size, q, scratch.q_stride, products, L);
        const Vec<A> scale = load(scratch.k_scales + (head * parts.groups + group) * kSmallQKeys + j);
        for (int r = 0; r < Count; ++r) {
            A* at = scores + r * kSmallQKeys;
            store(at, group ? multiply_add(load(products + r * L), scale, load(at)) : load(products + r * L) * scale);
        }
    }
    if (parts.rope_dim == 0) return;
    small_q_products<Count, T, T>(tile.k_rope + j, head * tile.rope_head, tile.count - j, parts.rope_dim, q, scratch.q_stride,
                                  products, L);
    for (int r = 0; r < Count; ++r) {
        A* at = scores + r * kSmallQKeys;
        store(at, load(at) + load(products + r * L));
    }
}

// small_q_output() of values with scales, for keys j to j + count - 1 of the tile. A key that the row does not see has weight 0,
// whatever its scale is.
template <int Count, class T, class C>
static void small_q_scaled_output(const SmallQScratch<T>& scratch, const SmallQKeyTile<T, C>& tile, const ScoreRule<Acc<T>>& rule,
                                  int64_t j, int64_t count, int64_t head, int64_t r, Start start) {
    using A = Acc<T>;
    const KeyParts& parts = scratch.parts;
    const QueryTile<T>& query_tile = scratch.query_tiles[head];
    const Lanes<A>& lanes = query_tile.lanes;
    const A* p = scratch.scores + (head * scratch.rows + r) * kSmallQKeys + j;
    A weights[Count * kSmallQValues];
    for (int64_t group = 0; group < parts.v_groups; ++group) {
        const int64_t scale = head * tile.v_scale_head + group * tile.v_scale_group;
        for (int n = 0; n < Count; ++n)
            for (int64_t i = 0; i < count; ++i) {
                const int64_t key = tile.first + j + i;
                const bool seen = key >= lanes.first_key[r + n] && key < lanes.last_key[r + n] &&
                                  (!rule.gaps || rule.gaps->sees((lanes.row0 + r + n) / rule.group, key));
                weights[n * kSmallQValues + i] = seen ? p[n * kSmallQKeys + i] * tile.v_scale[j + i][scale] : 0;
            }
        small_q_output<Count, T, C>(tile.v + j, head * tile.v_head + group * parts.v_group_size, count, parts.v_group_size,
                                    weights, kSmallQValues,
                                    query_tile.o + r * scratch.o_stride + group * (scratch.o_stride / parts.v_groups),
                                    scratch.o_stride, query_tile.softmax.rescale + r, start);
    }
}

// Prefetches `step` rows from row `j` on into the L2 cache.
template <class T>
FLASH_INLINE void prefetch_rows(const T* const* rows, int64_t j, int64_t count, int64_t step, int64_t head, int64_t channels) {
    const int64_t end = j + step < count ? j + step : count, bytes = channels * static_cast<int64_t>(sizeof(T));
    for (; j < end; ++j) {
        const char* at = reinterpret_cast<const char*>(rows[j] + head);
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(at + byte, 0, 2);
    }
}

template <class T, class C>
static void small_q_attend(const SmallQScratch<T>& scratch, const SmallQKeyTile<T, C>& tile, const SmallQKeyTile<T, C>& next,
                           HeadDims dims, const ScoreRule<Acc<T>>& rule) {
    constexpr int64_t L = kLanes<Acc<T>>;
    const int64_t rows = scratch.rows, k_channels = dims.qk - scratch.parts.rope_dim;
    const bool plain = scratch.parts.plain;
    if (!plain) load_k_scales(scratch, tile);
    for (int64_t j = 0; j < tile.count; j += L)
        for (int64_t head = 0; head < scratch.heads; ++head) {
            if (j + L < tile.count)
                prefetch_rows(tile.k, j + L, tile.count, L, head * tile.k_head, k_channels);
            else
                prefetch_rows(tile.v, 0, tile.count, kSmallQValues, head * tile.v_head, dims.v);
            for_row_blocks(rows, [&](auto block, int64_t r) __attribute__((always_inline)) {
                const int64_t row = head * rows + r;
                if (plain)
                    small_q_products<decltype(block)::value, T, C>(tile.k + j, head * tile.k_head, tile.count - j, dims.qk,
                                                                   scratch.q + row * scratch.q_stride, scratch.q_stride,
                                                                   scratch.scores + row * kSmallQKeys + j, kSmallQKeys);
                else
                    small_q_part_products<decltype(block)::value, T, C>(scratch, tile, j, head, row);
            });
        }
    for (int64_t head = 0; head < scratch.heads; ++head) {
        Acc<T>* of_head = scratch.scores + head * rows * kSmallQKeys;
        for (int64_t r = 0; r < rows; ++r)
            small_q_scores(rule, scratch.query_tiles[head].lanes, r, tile.first, tile.count, of_head + r * kSmallQKeys);
        if (rule.gaps) hide_gaps<Acc<T>>(rule, scratch.query_tiles[head].lanes, tile.first, tile.count, of_head, kSmallQKeys, 1);
        for (int64_t r = 0; r < rows; ++r)
            small_q_softmax<T>(scratch.query_tiles[head].softmax, r, tile.count, score_unit(rule), of_head + r * kSmallQKeys);
    }
    for (int64_t j = 0; j < tile.count; j += kSmallQValues)
        for (int64_t head = 0; head < scratch.heads; ++head) {
            if (j + kSmallQValues < tile.count)
                prefetch_rows(tile.v, j + kSmallQValues, tile.count, kSmallQValues, head * tile.v_head, dims.v);
            else
                prefetch_rows(next.k, 0, next.count, L, head * next.k_head, k_channels);
            const QueryTile<T>& query_tile = scratch.query_tiles[head];
            const int64_t left = tile.count - j < kSmallQValues ? tile.count - j : kSmallQValues;
            const Start start = j > 0 ? Start::add : query_tile.empty ? Start::zero : Start::scaled;
            for_row_blocks(rows, [&](auto block, int64_t r) __attribute__((always_inline)) {
                if (plain)
                    small_q_output<decltype(block)::value, T, C>(tile.v + j, head * tile.v_head, left, dims.v,
                                                                 scratch.scores + (head * rows + r) * kSmallQKeys + j,
                                                                 kSmallQKeys, query_tile.o + r * scratch.o_stride,
                                                                 scratch.o_stride, query_tile.softmax.rescale + r, start);
                else
                    small_q_scaled_output<decltype(block)::value, T, C>(scratch, tile, rule, j, left, head, r, start);
            });
        }
    for (int64_t head = 0; head < scratch.heads; ++head) scratch.query_tiles[head].empty = false;
}

// Loops over all visible keys, which are the same for each head. `cached`: the rows of the first head.
template <class T, template <class> class Rows, class C>
static void small_q_loop_over_keys(const SmallQScratch<T>& scratch, const CachedHead<Rows, T, C>& cached, const KvCache& cache,
                                   HeadDims dims, const ScoreRule<Acc<T>>& rule) {
    const KeyRange visible = scratch.query_tiles[0].lanes.seen_by_any;
    SmallQKeyTile<T, C> tiles[2];
    for (SmallQKeyTile<T, C>& tile : tiles) tile.set_strides(cache);
    int current = 0;
    if (!visible.empty()) tiles[current].find(cached, scratch.parts, visible.first, visible.last);
    for (int64_t key = visible.first; key < visible.last; key += kSmallQKeys, current ^= 1) {
        cancellation_point();
        SmallQKeyTile<T, C>& next = tiles[current ^ 1];
        next.count = 0;
        for (int64_t head = 0; head < scratch.heads; ++head)
            add_finished_block(scratch.query_tiles[head], key, dims.v, scratch.o_stride, score_unit(rule));
        if (key + kSmallQKeys < visible.last) next.find(cached, scratch.parts, key + kSmallQKeys, visible.last);
        small_q_attend(scratch, tiles[current], next, dims, rule);
    }
}

template <class T, class Rows>
static void small_q_store(const QueryTile<T>& query_tile, const KeyParts& parts, const Rows& out) {
    using A = Acc<T>;
    const int64_t stride = small_q_stride<T>(parts), channels = parts.v_group_size;
    for (int64_t r = 0; r < query_tile.lanes.rows; ++r) {
        const A factor = query_tile.softmax.rescale[r];
        for (int64_t group = 0; group < parts.v_groups; ++group) {
            const A* from = query_tile.o + r * stride + group * (stride / parts.v_groups);
            T* to = out(r) + group * channels;
            for (int64_t c = 0; c < channels; c += kLanes<A>) {
                const Vec<A> o = query_tile.empty || factor == 0 ? Vec<A>{} : load(from + c) * broadcast(factor);
                store_part(to + c, o, channels - c);
            }
        }
    }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
