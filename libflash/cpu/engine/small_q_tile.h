// Decode with vectors along the channels: a tile of keys, with their parts and scales.
#pragma once

#include "cpu/engine/small_q_products.h"
#include "cpu/engine/small_q_scratch.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// Addresses of the rows of a key tile for the first head, and the distances to the next head and to the next channel group. The
// addresses of rope parts and scales are set only if the call has them.
template <class T, class C>
struct SmallQKeyTile {
    int64_t first = 0, begin = 0, count = 0;  // keys first + begin to first + count - 1; first is a multiple of kSmallQKeys
    const C *k[kSmallQKeys], *v[kSmallQKeys];
    const T* k_rope[kSmallQKeys];
    const float *k_scale[kSmallQKeys], *v_scale[kSmallQKeys];
    bool one_k_scale = false, one_v_scale = false;  // all keys have the address k_scale[0], or v_scale[0]
    int64_t k_head = 0, v_head = 0, rope_head = 0, k_scale_head = 0, v_scale_head = 0;
    int64_t k_scale_group = 0, v_scale_group = 0;

    void set_strides(const KvCache& cache) {
        k_head = cache.k.stride[2], v_head = cache.v.stride[2], rope_head = cache.k_rope.stride[2];
        k_scale_head = cache.k_scale.head_stride, v_scale_head = cache.v_scale.head_stride;
        k_scale_group = cache.k_scale.group_stride, v_scale_group = cache.v_scale.group_stride;
    }
    // Sets the addresses for the keys of `visible` in the tile that begins at `key`. Entries of earlier keys get the address of
    // the first visible key.
    template <class Cached>
    void find(const Cached& cached, const KeyParts& parts, int64_t key, KeyRange visible) {
        const int64_t left = visible.last - key;
        first = key, begin = visible.first > key ? visible.first - key : 0, count = left < kSmallQKeys ? left : kSmallQKeys;
        const auto find_visible = [&](const auto& rows, auto** to) {
            find_rows(rows, first + begin, count - begin, to + begin);
            for (int64_t j = 0; j < begin; ++j) to[j] = to[begin];
        };
        const auto find_scales = [&](const auto& rows, const float** to, bool& one) {
            one = are_one_row(rows);
            if (one)
                to[0] = rows(first + begin);
            else
                find_visible(rows, to);
        };
        find_visible(cached.k, k), find_visible(cached.v, v);
        if (parts.plain) return;
        find_scales(cached.k_scale, k_scale, one_k_scale), find_scales(cached.v_scale, v_scale, one_v_scale);
        if (parts.rope_dim > 0) find_visible(cached.k_rope, k_rope);
    }
    // The keys of the tile in the range of row r, counted from the first key of the tile.
    template <class A>
    FLASH_INLINE KeyRange range(const Lanes<A>& lanes, int64_t r) const {
        const int64_t from = lanes.first_key[r] - first, to = lanes.last_key[r] - first;
        return {from > begin ? from : begin, to < count ? to : count};
    }
};

// Copies the scales of `count` keys, or one scale for all.
template <class A>
static void copy_scales(const float* const* from, bool one, int64_t at, int64_t count, A* to) {
    if (!one) {
        for (int64_t j = 0; j < count; ++j) to[j] = from[j][at];
        return;
    }
    const Vec<A> scale = broadcast(static_cast<A>(from[0][at]));
    for (int64_t j = 0; j < kSmallQKeys; j += kLanes<A>) store(to + j, scale);
}

// Copies the scales of a tile to scratch.k_scales and scratch.v_scales.
template <class T, class C>
static void load_scales(const SmallQScratch<T>& scratch, const SmallQKeyTile<T, C>& tile) {
    const KeyParts& parts = scratch.parts;
    for (int64_t head = 0; head < scratch.heads; ++head) {
        for (int64_t group = 0; group < parts.groups; ++group)
            copy_scales(tile.k_scale, tile.one_k_scale, head * tile.k_scale_head + group * tile.k_scale_group, tile.count,
                        scratch.k_scales + (head * parts.groups + group) * kSmallQKeys);
        for (int64_t group = 0; group < parts.v_groups; ++group)
            copy_scales(tile.v_scale, tile.one_v_scale, head * tile.v_scale_head + group * tile.v_scale_group, tile.count,
                        scratch.v_scales + (head * parts.v_groups + group) * kSmallQKeys);
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

// p times the scales of the values of `count` keys, from key `first` of a tile on, or of the keys `seen`.
template <class A>
static void scale_weights(const A* p, const A* scales, int64_t first, const int64_t* seen, int64_t count, A* to) {
    int64_t i = 0;
    if (seen) {
        for (; i < count; ++i) to[i] = p[i] * scales[seen[i]];
        return;
    }
    for (; i + kLanes<A> <= count; i += kLanes<A>) store(to + i, load(p + i) * load(scales + first + i));
    for (; i < count; ++i) to[i] = p[i] * scales[first + i];
}

// Adds the values of `count` keys, at most kSmallQValues, to the output of `Count` rows that see all of them: of the tile's keys
// from `first` on, or of the keys `seen`. v and p point to the entries of the first of these keys.
template <int Count, class T, class C>
static void small_q_add_values(const SmallQScratch<T>& scratch, const SmallQKeyTile<T, C>& tile, const C* const* v,
                               const Acc<T>* p, int64_t p_stride, int64_t first, const int64_t* seen, int64_t count, int64_t head,
                               int64_t r) {
    using A = Acc<T>;
    const KeyParts& parts = scratch.parts;
    A* o = scratch.query_tiles[head].o + r * scratch.o_stride;
    const int64_t v_head = head * tile.v_head, channels = parts.v_group_size;
    if (parts.plain) return small_q_output<Count, T, C>(v, v_head, count, channels, p, p_stride, o, scratch.o_stride);
    A weights[Count * kSmallQValues];
    for (int64_t group = 0; group < parts.v_groups; ++group, o += scratch.o_stride / parts.v_groups) {
        const A* scales = scratch.v_scales + (head * parts.v_groups + group) * kSmallQKeys;
        for (int n = 0; n < Count; ++n) scale_weights(p + n * p_stride, scales, first, seen, count, weights + n * kSmallQValues);
        small_q_output<Count, T, C>(v, v_head + group * channels, count, channels, weights, kSmallQValues, o, scratch.o_stride);
    }
}

// small_q_add_values() for one row, with those of the tile's keys `keys` that the row sees.
template <class T, class C>
static void small_q_add_seen_values(const SmallQScratch<T>& scratch, const SmallQKeyTile<T, C>& tile,
                                    const ScoreRule<Acc<T>>& rule, KeyRange keys, int64_t head, int64_t r) {
    const Lanes<Acc<T>>& lanes = scratch.query_tiles[head].lanes;
    const Acc<T>* p = scratch.scores + (head * scratch.rows + r) * kSmallQKeys;
    const KeyRange own = tile.range(lanes, r);
    const C* v[kSmallQValues];
    int64_t seen[kSmallQValues], count = 0;
    Acc<T> weights[kSmallQValues];
    for (int64_t j = keys.first; j < keys.last; ++j) {
        if (j < own.first || j >= own.last) continue;
        if (rule.gaps && !rule.gaps->sees((lanes.row0 + r) / rule.group, tile.first + j)) continue;
        v[count] = tile.v[j], weights[count] = p[j], seen[count++] = j;
    }
    if (count > 0) small_q_add_values<1, T, C>(scratch, tile, v, weights, kSmallQValues, 0, seen, count, head, r);
}

// The same for `Count` rows: for all of them at once if each sees all keys.
template <int Count, class T, class C>
static void small_q_add_values_of_rows(const SmallQScratch<T>& scratch, const SmallQKeyTile<T, C>& tile,
                                       const ScoreRule<Acc<T>>& rule, KeyRange keys, int64_t head, int64_t r) {
    bool all = !rule.gaps;
    for (int64_t n = r; n < r + Count; ++n) {
        const KeyRange own = tile.range(scratch.query_tiles[head].lanes, n);
        all = all && own.first <= keys.first && own.last >= keys.last;
    }
    if (!all) {
        for (int64_t n = r; n < r + Count; ++n) small_q_add_seen_values(scratch, tile, rule, keys, head, n);
        return;
    }
    small_q_add_values<Count, T, C>(scratch, tile, tile.v + keys.first,
                                    scratch.scores + (head * scratch.rows + r) * kSmallQKeys + keys.first, kSmallQKeys,
                                    keys.first, nullptr, keys.count(), head, r);
}

// Prefetches `step` rows from row `j` on into the L1 cache.
template <class T>
FLASH_INLINE void prefetch_rows(const T* const* rows, int64_t j, int64_t count, int64_t step, int64_t head, int64_t channels) {
    const int64_t end = j + step < count ? j + step : count, bytes = channels * static_cast<int64_t>(sizeof(T));
    for (; j < end; ++j) {
        const char* at = reinterpret_cast<const char*>(rows[j] + head);
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(at + byte, 0, 3);
    }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
