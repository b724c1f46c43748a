// Decode with vectors along the channels: the query rows of a task.
#pragma once

#include "cpu/engine/small_q_elements.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// The query rows of neighbouring key heads: operands, scores and softmax state.
template <class T>
struct SmallQScratch {
    int64_t heads = 0, rows = 0;  // rows: per head
    int64_t q_stride = 0, o_stride = 0;
    int64_t segment = 0;                             // keys of a segment
    QueryTile<T>* query_tiles = nullptr;             // one per head; q is not used, o is [row][channel]
    SmallQElement<T>* q = nullptr;                   // [head][row][channel], padded with zeros to whole steps
    Acc<T>* scores = nullptr;                        // [head][row][key]
    Acc<T>*k_scales = nullptr, *v_scales = nullptr;  // [head][group of channels][key]; only with parts
    KeyParts parts;

    void lay_out(Arena& arena, const KeyParts& parts_of_keys, int64_t most_keys, int64_t most_heads, int64_t rows_of_head,
                 int64_t keys_of_segment) {
        heads = most_heads, rows = rows_of_head, parts = parts_of_keys, segment = keys_of_segment;
        q_stride = parts.groups * small_q_part<T>(parts.group_size) + small_q_part<T>(parts.rope_dim);
        o_stride = small_q_stride<T>(parts);
        query_tiles = arena.allocate<QueryTile<T>>(heads);
        q = arena.allocate<SmallQElement<T>>(heads * rows * q_stride);
        scores = arena.allocate<Acc<T>>(heads * rows * kSmallQKeys);
        if (!parts.plain) {
            k_scales = arena.allocate<Acc<T>>(heads * parts.groups * kSmallQKeys);
            v_scales = arena.allocate<Acc<T>>(heads * parts.v_groups * kSmallQKeys);
        }
        for (int64_t head = 0; head < heads; ++head) {
            QueryTile<T> query_tile;
            query_tile.lanes.lay_out(arena);
            query_tile.softmax.lay_out(arena);
            query_tile.o = arena.allocate<Acc<T>>(rows * o_stride);
            query_tile.totals.lay_out(arena, most_keys, rows * o_stride, segment);
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
        QueryTile<T>& query_tile = query_tiles[head];
        query_tile.start();
        query_tile.empty = false;
        clear_output(query_tile);
        for (int64_t r = 0; query_tile.totals.output && r < rows; ++r) query_tile.totals.row_sum[r] = 0;
    }
    void clear_output(const QueryTile<T>& query_tile) const {
        std::memset(query_tile.o, 0, static_cast<size_t>(rows * o_stride) * sizeof(Acc<T>));
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

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
