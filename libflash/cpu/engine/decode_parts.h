// The parts of a cached key and value: groups of channels that share a scale, and the rope part of a key. A score is the sum over
// the parts of scale times product. Scales of values go into the probabilities.
#pragma once

#include "cpu/engine/attend.h"
#include "cpu/engine/codes.h"
#include "cpu/engine/decode_rows.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

struct KeyParts {
    int64_t groups = 1, group_size = 0;      // of the channels of k_cache
    int64_t rope_dim = 0;                    // further channels of a key
    int64_t v_groups = 1, v_group_size = 0;  // of the channels of v_cache
    bool plain = true;                       // one part without a scale, and values without a scale

    KeyParts() = default;
    explicit KeyParts(const KvCache& cache)
        : groups(cache.k_scale.groups), group_size(cache.k.shape[3] / groups), rope_dim(cache.rope_dim()),
          v_groups(cache.v_scale.groups), v_group_size(cache.v.shape[3] / v_groups),
          plain(!cache.k_scale.present && !cache.v_scale.present && !cache.k_rope.present) {}

    int64_t count() const { return groups + (rope_dim > 0 ? 1 : 0); }
    int64_t size(int64_t part) const { return part < groups ? group_size : rope_dim; }
    int64_t first_channel(int64_t part) const { return part * group_size; }
};

// The cached rows of one key head of one sequence. Without scales k_scale and v_scale are rows of ones.
template <template <class> class Rows, class T, class C>
struct CachedHead {
    Rows<const C> k, v;
    Rows<const T> k_rope;
    Rows<const float> k_scale, v_scale;
    int64_t k_group_stride = 0, v_group_stride = 0;  // from the scale of a group to the next one
};

static const float kNoScale = 1;

FLASH_INLINE const float* scale_start(const CacheScale& scale, int64_t batch, int64_t head) {
    return scale.present ? scale.data + batch * scale.batch_stride + head * scale.head_stride : &kNoScale;
}

// For a contiguous cache of q's type.
template <class T>
FLASH_INLINE CachedHead<StridedRows, T, T> entry_head(const DecodeProblem& problem, int64_t batch, int64_t head) {
    const KvCache& cache = problem.cache;
    const int64_t entry = cache.batch_idx ? cache.batch_idx[batch] : batch;
    CachedHead<StridedRows, T, T> made;
    made.k = entry_rows<T>(problem, cache.k, batch, head), made.v = entry_rows<T>(problem, cache.v, batch, head);
    if (cache.k_rope.present) made.k_rope = entry_rows<T>(problem, cache.k_rope, batch, head);
    for (const bool key : {true, false}) {
        const CacheScale& scale = key ? cache.k_scale : cache.v_scale;
        StridedRows<const float>& rows = key ? made.k_scale : made.v_scale;
        rows.data = scale_start(scale, batch, head) + entry * scale.block_stride, rows.stride = scale.row_stride;
    }
    made.k_group_stride = cache.k_scale.group_stride, made.v_group_stride = cache.v_scale.group_stride;
    return made;
}

// Rows of one sequence in pages. A contiguous cache counts as one page, the entry of the sequence.
template <class T>
FLASH_INLINE PagedRows<const T> rows_in_pages(const KvCache& cache, int64_t batch, const void* start, int64_t block_stride,
                                              int64_t row_stride) {
    const T* data = static_cast<const T*>(start);
    if (cache.paged()) {
        const int64_t* step = cache.block_table_stride;
        return {data, block_stride, row_stride, cache.block_table + batch * step[0], step[1], cache.page_size};
    }
    static const int32_t first_page = 0;
    const int64_t entry = cache.batch_idx ? cache.batch_idx[batch] : batch;
    return {data + entry * block_stride, 0, row_stride, &first_page, 0, INT32_MAX};
}

// For any cache: contiguous or paged, of q's type or of codes.
template <class T, class C>
FLASH_INLINE CachedHead<PagedRows, T, C> paged_head(const DecodeProblem& problem, int64_t batch, int64_t head) {
    const KvCache& cache = problem.cache;
    const auto rows = [&](const TensorView& tensor, auto* type) __attribute__((always_inline)) {
        using E = std::remove_pointer_t<decltype(type)>;
        return rows_in_pages<E>(cache, batch, static_cast<const E*>(tensor.data) + head * tensor.stride[2], tensor.stride[0],
                                tensor.stride[1]);
    };
    const auto scales = [&](const CacheScale& scale) __attribute__((always_inline)) {
        return rows_in_pages<float>(cache, batch, scale_start(scale, batch, head), scale.block_stride, scale.row_stride);
    };
    CachedHead<PagedRows, T, C> made;
    made.k = rows(cache.k, static_cast<C*>(nullptr)), made.v = rows(cache.v, static_cast<C*>(nullptr));
    if (cache.k_rope.present) made.k_rope = rows(cache.k_rope, static_cast<T*>(nullptr));
    made.k_scale = scales(cache.k_scale), made.v_scale = scales(cache.v_scale);
    made.k_group_stride = cache.k_scale.group_stride, made.v_group_stride = cache.v_scale.group_stride;
    return made;
}

// The same rows without their first `c` channels.
template <class Rows>
FLASH_INLINE Rows from_channel(Rows rows, int64_t c) {
    rows.data += c;
    return rows;
}

// Elements that one query row has in a query tile with parts.
template <class T>
FLASH_INLINE int64_t query_elements(const KeyParts& parts) {
    return parts.groups * elements_for<T>(parts.group_size) + elements_for<T>(parts.rope_dim);
}

// Loads the queries: [part][channel or pair][lane].
template <class T, class Rows>
static void load_query_parts(QueryTile<T>& query_tile, const Rows& rows, const KeyParts& parts) {
    Element<T>* to = query_tile.q;
    for (int64_t part = 0; part < parts.count(); ++part) {
        pack_columns<T>(from_channel(rows, parts.first_channel(part)), query_tile.lanes.rows, query_tile.lanes.width,
                        parts.size(part), to);
        to += elements_for<T>(parts.size(part)) * query_tile.lanes.width;
    }
    query_tile.start();
}

// scores[key][lane] (+)= scale of the key * part[key][lane].
template <class A, class ScaleRows>
static void add_scaled(const A* part, int64_t width, const ScaleRows& scales, int64_t group, int64_t first, int64_t count,
                       bool add, A* scores) {
    for (int64_t j = 0; j < count; ++j) {
        const Vec<A> scale = broadcast(static_cast<A>(scales(first + j)[group]));
        for (int64_t i = j * width; i < (j + 1) * width; i += kLanes<A>) {
            const Vec<A> product = load(part + i);
            store(scores + i, add ? multiply_add(product, scale, load(scores + i)) : product * scale);
        }
    }
}

template <class T, class Cached>
static void multiply_parts(const QueryTile<T>& query_tile, const Cached& cached, const KeyParts& parts, int64_t first,
                           int64_t count, const KeyTileScratch<T>& keys, const TileScratch<T>& scratch) {
    using A = Acc<T>;
    const int64_t width = query_tile.lanes.width;
    const Element<T>* q = query_tile.q;
    for (int64_t part = 0; part < parts.count(); ++part) {
        const bool rope = part == parts.groups;
        const int64_t size = parts.size(part), elements = elements_for<T>(size);
        const Operand<Element<T>> k =
            rope ? cached_rows_operand<T>(cached.k_rope, first, count, size, keys.k)
                 : cached_rows_operand<T>(from_channel(cached.k, parts.first_channel(part)), first, count, size, keys.k);
        multiply<Element<T>>(
            {count, width, elements, k.data, k.stride, 1, q, width, scratch.additive, width, Start::zero, nullptr});
        q += elements * width;
        if (rope)
            add_scaled<A>(scratch.additive, width, StridedRows<const float>{&kNoScale, 0}, 0, first, count, true, scratch.scores);
        else
            add_scaled<A>(scratch.additive, width, cached.k_scale, part * cached.k_group_stride, first, count, part > 0,
                          scratch.scores);
    }
}

// weights[key][lane] = p * the scale of the key's value, and 0 where the lane does not see the key, whatever the scale is.
template <class A, class ScaleRows>
static void scale_probabilities(const Lanes<A>& lanes, const A* p, const ScaleRows& scales, int64_t group, int64_t first,
                                int64_t count, A* weights) {
    using I = Vec<Integer<A>>;
    for (int64_t j = 0; j < count; ++j) {
        const Vec<A> scale = broadcast(static_cast<A>(scales(first + j)[group]));
        const I key = broadcast<Integer<A>>(static_cast<Integer<A>>(first + j));
        for (int64_t i = 0; i < lanes.width; i += kLanes<A>) {
            const I from = load(lanes.first_key + i), to = load(lanes.last_key + i);
            const Vec<A> weight = load(p + j * lanes.width + i) * scale;
            store(weights + j * lanes.width + i, ((from <= key) & (key < to)) ? weight : Vec<A>{});
        }
    }
}

// attend() for keys first to first + count - 1 with parts. Uses scratch.additive as a second buffer for a tile.
template <class T, class Cached>
static void attend_parts(QueryTile<T>& query_tile, const Cached& cached, const KeyParts& parts, HeadDims dims, int64_t first,
                         int64_t count, const ScoreRule<Acc<T>>& rule, const KeyTileScratch<T>& keys,
                         const TileScratch<T>& scratch) {
    using A = Acc<T>;
    using E = Element<T>;
    Lanes<A>& lanes = query_tile.lanes;
    const int64_t width = lanes.width;
    multiply_parts(query_tile, cached, parts, first, count, keys, scratch);
    if (!rule.plain) make_scores<A>(rule, lanes, first, count, scratch.scores, nullptr, nullptr);
    const bool edge = is_edge_tile(lanes, first, count);
    if (edge) hide_outside(lanes, first, count, scratch.scores);
    if (rule.gaps) hide_gaps<A>(rule, lanes, first, count, scratch.scores, 1, width);
    softmax_tile<T, true>(query_tile.softmax, scratch.scores, count, width, score_unit(rule), scratch.p);
    const Operand<E> v = cached_row_elements_operand<T>(cached.v, first, count, dims.v, keys.v);
    for (int64_t group = 0; group < parts.v_groups; ++group) {
        const int64_t channel = group * parts.v_group_size;
        scale_probabilities(lanes, scratch.scores, cached.v_scale, group * cached.v_group_stride, first, count, scratch.additive);
        if (rule.gaps) fill_gaps<A>(rule, lanes, first, count, scratch.additive, 1, width, 0);
        E* p;
        if constexpr (kPaired<T>)
            p = scratch.p;
        else
            p = scratch.additive;
        pack_probabilities<T>(scratch.additive, count, width, p);
        multiply_masked<Weights::b, E>(
            {parts.v_group_size, width, elements_for<T>(count), v.data + channel, 1, v.stride, p, width,
             query_tile.o + channel * width, width, query_tile.empty ? Start::zero : Start::scaled, query_tile.softmax.rescale},
            edge || rule.gaps || (kPaired<T> && count % 2 != 0));
    }
    query_tile.empty = false;
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
