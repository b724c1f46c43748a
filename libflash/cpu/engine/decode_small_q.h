// Decode with vectors along the channels: for at most kSmallQRows query rows per key head, and for any number of rows with
// FLASH_FLAG_INVARIANT_ROWS. With few query rows, one row per lane would leave most lanes idle, and the time is that of reading
// the cache. So all heads of a few keys are processed before the next keys: the cache is read in memory order. Scores are stored
// as [row][key], outputs as [row][channel].
//
// The bits of a row depend only on the row, its keys and the indices of these keys.
// - They do not depend on the other rows of the tile: key tiles begin at multiples of kSmallQKeys and groups of values at
//   multiples of kSmallQValues, counted from the first key of the sequence, and a key that a row does not see is left out of its
//   sums.
// - They do not depend on how the work is divided: the sums start from zero at each multiple of `segment` keys, and
//   fold_segment() adds the segments in ascending order, within one task or after several tasks.
#pragma once

#include "cpu/cancel.h"
#include "cpu/engine/small_q_softmax.h"
#include "cpu/engine/small_q_tile.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// Products with the keys of a tile, for a vector of neighbouring keys at a time. Rows that see none of these keys are skipped;
// small_q_scores() hides their scores.
template <class T, class C>
static void small_q_score_products(const SmallQScratch<T>& scratch, const SmallQKeyTile<T, C>& tile, HeadDims dims) {
    constexpr int64_t L = kLanes<Acc<T>>;
    const int64_t rows = scratch.rows, k_channels = dims.qk - scratch.parts.rope_dim;
    const bool plain = scratch.parts.plain;
    for (int64_t j = tile.begin / L * L; j < tile.count; j += L)
        for (int64_t head = 0; head < scratch.heads; ++head) {
            if (j + L < tile.count)
                prefetch_rows(tile.k, j + L, tile.count, L, head * tile.k_head, k_channels);
            else
                prefetch_rows(tile.v, tile.begin, tile.count, kSmallQValues, head * tile.v_head, dims.v);
            const Lanes<Acc<T>>& lanes = scratch.query_tiles[head].lanes;
            for_row_blocks(rows, [&](auto block, int64_t r) __attribute__((always_inline)) {
                constexpr int kCount = decltype(block)::value;
                bool any = false;
                for (int64_t n = r; n < r + kCount; ++n)
                    any = any || (lanes.first_key[n] < tile.first + j + L && lanes.last_key[n] > tile.first + j);
                if (!any) return;
                const int64_t row = head * rows + r;
                if (plain)
                    small_q_products<kCount, T, C>(tile.k + j, head * tile.k_head, tile.count - j, dims.qk,
                                                   scratch.q + row * scratch.q_stride, scratch.q_stride,
                                                   scratch.scores + row * kSmallQKeys + j, kSmallQKeys);
                else
                    small_q_part_products<kCount, T, C>(scratch, tile, j, head, row);
            });
        }
}

template <class T, class C>
static void small_q_attend(const SmallQScratch<T>& scratch, const SmallQKeyTile<T, C>& tile, const SmallQKeyTile<T, C>& next,
                           HeadDims dims, const ScoreRule<Acc<T>>& rule) {
    const int64_t rows = scratch.rows, k_channels = dims.qk - scratch.parts.rope_dim;
    if (!scratch.parts.plain) load_scales(scratch, tile);
    small_q_score_products(scratch, tile, dims);
    for (int64_t head = 0; head < scratch.heads; ++head) {
        const QueryTile<T>& query_tile = scratch.query_tiles[head];
        Acc<T>* of_head = scratch.scores + head * rows * kSmallQKeys;
        for (int64_t r = 0; r < rows; ++r)
            small_q_scores(rule, query_tile.lanes, r, tile.first, tile.count, of_head + r * kSmallQKeys);
        if (rule.gaps) hide_gaps<Acc<T>>(rule, query_tile.lanes, tile.first, tile.count, of_head, kSmallQKeys, 1);
        for (int64_t r = 0; r < rows; ++r)
            if (!tile.range(query_tile.lanes, r).empty())
                small_q_softmax<T>(query_tile, r, tile.count, score_unit(rule), of_head + r * kSmallQKeys, scratch.o_stride);
    }
    for (int64_t j = tile.begin / kSmallQValues * kSmallQValues; j < tile.count; j += kSmallQValues)
        for (int64_t head = 0; head < scratch.heads; ++head) {
            if (j + kSmallQValues < tile.count)
                prefetch_rows(tile.v, j + kSmallQValues, tile.count, kSmallQValues, head * tile.v_head, dims.v);
            else
                prefetch_rows(next.k, 0, next.count, int64_t{kLanes<Acc<T>>}, head * next.k_head, k_channels);
            const int64_t from = j > tile.begin ? j : tile.begin, to = j + kSmallQValues;
            const KeyRange keys{from, to < tile.count ? to : tile.count};
            for_row_blocks(rows, [&](auto block, int64_t r) __attribute__((always_inline)) {
                small_q_add_values_of_rows<decltype(block)::value>(scratch, tile, rule, keys, head, r);
            });
        }
}

// Adds the segment to the totals and begins a new one. Without totals there is one segment.
template <class T>
static void end_segment(const SmallQScratch<T>& scratch, const QueryTile<T>& query_tile, Acc<T> unit) {
    const BlockedSums<Acc<T>>& totals = query_tile.totals;
    if (!totals.output) return;
    for (int64_t r = 0; r < scratch.rows; ++r)
        fold_segment(totals.row_max + r, totals.row_sum + r, totals.output + r * scratch.o_stride, query_tile.softmax.row_max[r],
                     query_tile.softmax.row_sum[r], query_tile.o + r * scratch.o_stride, scratch.o_stride, unit);
    SoftmaxState<Acc<T>> softmax = query_tile.softmax;
    softmax.start(query_tile.lanes.width);
    scratch.clear_output(query_tile);
}

// After the last segment: the totals become the state and the output of the query tile.
template <class T>
static void take_totals(const SmallQScratch<T>& scratch, const QueryTile<T>& query_tile) {
    const BlockedSums<Acc<T>>& totals = query_tile.totals;
    if (!totals.output) return;
    for (int64_t r = 0; r < scratch.rows; ++r) {
        if (totals.row_sum[r] == 0) continue;
        query_tile.softmax.row_max[r] = totals.row_max[r], query_tile.softmax.row_sum[r] = totals.row_sum[r];
        std::memcpy(query_tile.o + r * scratch.o_stride, totals.output + r * scratch.o_stride,
                    static_cast<size_t>(scratch.o_stride) * sizeof(Acc<T>));
    }
}

// Loops over all visible keys, which are the same for each head. `cached`: the rows of the first head.
template <class T, template <class> class Rows, class C>
static void small_q_loop_over_keys(const SmallQScratch<T>& scratch, const CachedHead<Rows, T, C>& cached, const KvCache& cache,
                                   HeadDims dims, const ScoreRule<Acc<T>>& rule) {
    const KeyRange visible = scratch.query_tiles[0].lanes.seen_by_any;
    SmallQKeyTile<T, C> tiles[2];
    for (SmallQKeyTile<T, C>& tile : tiles) tile.set_strides(cache);
    int current = 0;
    int64_t key = visible.first / kSmallQKeys * kSmallQKeys;
    if (!visible.empty()) tiles[current].find(cached, scratch.parts, key, visible);
    for (; key < visible.last; key += kSmallQKeys, current ^= 1) {
        cancellation_point();
        SmallQKeyTile<T, C>& next = tiles[current ^ 1];
        const int64_t end = key + kSmallQKeys;
        next.count = 0;
        if (end < visible.last) next.find(cached, scratch.parts, end, visible);
        small_q_attend(scratch, tiles[current], next, dims, rule);
        if (end % scratch.segment != 0 && end < visible.last) continue;
        for (int64_t head = 0; head < scratch.heads; ++head) end_segment(scratch, scratch.query_tiles[head], score_unit(rule));
    }
    for (int64_t head = 0; head < scratch.heads; ++head) take_totals(scratch, scratch.query_tiles[head]);
}

template <class T, class Rows>
static void small_q_store(const QueryTile<T>& query_tile, const KeyParts& parts, const Rows& out) {
    using A = Acc<T>;
    const int64_t stride = small_q_stride<T>(parts), channels = parts.v_group_size;
    for (int64_t r = 0; r < query_tile.lanes.rows; ++r) {
        const A factor = query_tile.softmax.rescale[r];
        for (int64_t group = 0; group < parts.v_groups; ++group) {
            const A* from = query_tile.o + r * stride + group * (stride / parts.v_groups);
            auto* to = out(r) + group * channels;
            for (int64_t c = 0; c < channels; c += kLanes<A>) {
                const Vec<A> o = factor == 0 ? Vec<A>{} : load(from + c) * broadcast(factor);
                store_part(to + c, o, channels - c);
            }
        }
    }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
