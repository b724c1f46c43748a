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
        const auto row = [&](int64_t j) { return first + (j < begin ? begin : j); };
        for (int64_t j = 0; j < count; ++j) k[j] = cached.k(row(j)), v[j] = cached.v(row(j));
        if (parts.plain) return;
        for (int64_t j = 0; j < count; ++j) k_scale[j] = cached.k_scale(row(j)), v_scale[j] = cached.v_scale(row(j));
        for (int64_t j = 0; parts.rope_dim > 0 && j < count; ++j) k_rope[j] = cached.k_rope(row(j));
    }
    // The keys of the tile in the range of row r, counted from the first key of the tile.
    template <class A>
    FLASH_INLINE KeyRange range(const Lanes<A>& lanes, int64_t r) const {
        const int64_t from = lanes.first_key[r] - first, to = lanes.last_key[r] - first;
        return {from > begin ? from : begin, to < count ? to : count};
    }
};

// Copies the scales of the keys of a tile to scratch.k_scales; 0 past the tile's last key.
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

// Adds the values of `count` keys, at most kSmallQValues, to the output of `Count` rows that see all of them. v, v_scale and p
// point to the entries of the first key.
template <int Count, class T, class C>
static void small_q_add_values(const SmallQScratch<T>& scratch, const SmallQKeyTile<T, C>& tile, const C* const* v,
                               const float* const* v_scale, const Acc<T>* p, int64_t p_stride, int64_t count, int64_t head,
                               int64_t r) {
    using A = Acc<T>;
    const KeyParts& parts = scratch.parts;
    A* o = scratch.query_tiles[head].o + r * scratch.o_stride;
    const int64_t v_head = head * tile.v_head, channels = parts.v_group_size;
    if (parts.plain) return small_q_output<Count, T, C>(v, v_head, count, channels, p, p_stride, o, scratch.o_stride);
    A weights[Count * kSmallQValues];
    for (int64_t group = 0; group < parts.v_groups; ++group, o += scratch.o_stride / parts.v_groups) {
        const int64_t scale = head * tile.v_scale_head + group * tile.v_scale_group;
        for (int n = 0; n < Count; ++n)
            for (int64_t i = 0; i < count; ++i) weights[n * kSmallQValues + i] = p[n * p_stride + i] * v_scale[i][scale];
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
    const float* v_scale[kSmallQValues];
    Acc<T> weights[kSmallQValues];
    int64_t count = 0;
    for (int64_t j = keys.first; j < keys.last; ++j) {
        if (j < own.first || j >= own.last) continue;
        if (rule.gaps && !rule.gaps->sees((lanes.row0 + r) / rule.group, tile.first + j)) continue;
        v[count] = tile.v[j], weights[count] = p[j];
        if (!scratch.parts.plain) v_scale[count] = tile.v_scale[j];
        ++count;
    }
    if (count > 0) small_q_add_values<1, T, C>(scratch, tile, v, v_scale, weights, kSmallQValues, count, head, r);
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
    small_q_add_values<Count, T, C>(scratch, tile, tile.v + keys.first, tile.v_scale + keys.first,
                                    scratch.scores + (head * scratch.rows + r) * kSmallQKeys + keys.first, kSmallQKeys,
                                    keys.count(), head, r);
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

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
