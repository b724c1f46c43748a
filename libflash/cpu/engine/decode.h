// Decode: a few query rows of each sequence against its cache. The query heads that share a key head are the lanes of one panel, so
// the cache is read once for all of them; long caches are split into ranges of keys so that every thread has work, and whoever
// finishes the last range of a panel puts the partial results together, always in the same order.
#pragma once

#include "cpu/append.h"
#include "cpu/engine/attend.h"
#include "cpu/engine/decode_rows.h"
#include "cpu/engine/decode_split.h"
#include "cpu/engine/work.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kDecodeKeys = 128;
constexpr int64_t kSerialElements = 1 << 16;  // appended or turned: fewer are done before another thread has started

struct DecodeSizes {
    HeadDims dims;
    int64_t rows;    // of the group of one key head
    int64_t panels;  // that those make
    int64_t width;   // lanes of a panel, whole vectors
    int64_t groups;  // panels of the whole problem
    int64_t splits;

    template <class T>
    static DecodeSizes of(const DecodeProblem& problem) {
        DecodeSizes sizes;
        sizes.dims = {problem.head_dim, problem.head_dim_v};
        sizes.rows = problem.group_size() * problem.seqlen_q;
        sizes.panels = ceil_div(sizes.rows, kPanelWidth);
        sizes.width = round_up(sizes.rows < kPanelWidth ? sizes.rows : kPanelWidth, kLanes<Acc<T>>);
        sizes.groups = problem.batch * problem.heads_k * sizes.panels;
        sizes.splits = Splits(problem, sizes.panels).most(problem.cache.capacity);
        return sizes;
    }
};

// What one thread needs.
template <class T>
struct DecodeRoom {
    QueryPanel<T> panel;
    KeyTileRoom<T> keys;
    TileRoom<T> tile;
    Acc<T>* lse = nullptr;
    double* sinks = nullptr;

    void lay_out(Arena& arena, HeadDims dims) {
        panel.lay_out(arena, dims);
        keys.lay_out(arena, dims, kDecodeKeys);
        tile.lay_out(arena, kDecodeKeys, false);
        lse = arena.take<Acc<T>>(kPanelWidth);
        sinks = arena.take<double>(kPanelWidth);
    }
};

// The whole workspace: turned queries, partial results, then a room for each thread.
template <class T>
struct DecodeMemory {
    T* turned = nullptr;
    Partials<T> partials;
    int32_t* finished = nullptr;  // ranges done, of each panel
    char* rooms = nullptr;
    size_t room_bytes = 0, bytes = 0;

    DecodeMemory(const DecodeProblem& problem, const DecodeSizes& sizes, int threads, void* workspace) {
        Arena arena(workspace);
        if (problem.rotary_cos.present)
            turned = arena.take<T>(problem.batch * problem.seqlen_q * problem.heads_q * problem.head_dim);
        if (sizes.splits > 1) {
            partials.lay_out(arena, sizes.groups * sizes.splits, sizes.width, sizes.dims.v);
            finished = arena.take<int32_t>(sizes.groups);
        }
        Arena one(nullptr);
        DecodeRoom<T>().lay_out(one, sizes.dims);
        room_bytes = one.used();
        rooms = arena.take<char>(static_cast<int64_t>(room_bytes) * threads);
        bytes = arena.used();
    }
    DecodeRoom<T> room(int thread, HeadDims dims) const {
        Arena arena(rooms + room_bytes * static_cast<size_t>(thread));
        DecodeRoom<T> room;
        room.lay_out(arena, dims);
        return room;
    }
};

template <class T>
class DecodeItem {
    using A = Acc<T>;

public:
    DecodeItem(const DecodeProblem& problem, const DecodeSizes& sizes, const DecodeMemory<T>& memory, int64_t group, int thread)
        : problem_(problem), sizes_(sizes), memory_(memory), room_(memory.room(thread, sizes.dims)), group_(group),
          batch_(group / sizes.panels / problem.heads_k), key_head_(group / sizes.panels % problem.heads_k),
          row0_(group % sizes.panels * kPanelWidth),
          rows_(sizes.rows - row0_ < kPanelWidth ? sizes.rows - row0_ : kPanelWidth), own_(room_.panel) {
        rule_.alibi = problem.alibi_slopes.present;
        rule_.set(problem.softmax_scale, problem.softcap);
    }

    void run(int64_t split) {
        QueryPanel<T>& panel = room_.panel;
        const int64_t partial = group_ * sizes_.splits + split;
        if (sizes_.splits > 1) memory_.partials.lend(panel, partial);
        const KeyRange range = Splits(problem_, sizes_.panels).range(split, problem_.cached(batch_) + problem_.seqlen_new);
        set_lanes(panel.lanes, problem_, batch_, key_head_, row0_, rows_, range);
        panel.load_queries(query_rows(), sizes_.dims);
        if (problem_.cache.paged())
            walk(paged_rows<T>(problem_, problem_.cache.k, batch_, key_head_), paged_rows<T>(problem_, problem_.cache.v, batch_, key_head_));
        else
            walk(entry_rows<T>(problem_, problem_.cache.k, batch_, key_head_), entry_rows<T>(problem_, problem_.cache.v, batch_, key_head_));
        if (sizes_.splits == 1) return finish(panel);
        memory_.partials.empty[partial] = panel.empty;
        if (__atomic_add_fetch(&memory_.finished[group_], 1, __ATOMIC_ACQ_REL) == sizes_.splits) combine_all();
    }

private:
    GroupRows<const T> query_rows() const {
        const int64_t group = problem_.group_size(), head = key_head_ * group;
        if (!memory_.turned) {
            const int64_t* at = problem_.q.stride;
            return {static_cast<const T*>(problem_.q.data) + batch_ * at[0] + head * at[2], at[1], at[2], group, row0_};
        }
        const int64_t dim = problem_.head_dim, position = problem_.heads_q * dim;
        return {memory_.turned + batch_ * problem_.seqlen_q * position + head * dim, position, dim, group, row0_};
    }

    template <class Rows>
    void walk(const Rows& k, const Rows& v) {
        const KeyRange some = room_.panel.lanes.some;
        for (int64_t first = some.first; first < some.last; first += kDecodeKeys) {
            const int64_t left = some.last - first;
            const KeyTile<T> tile = load_key_tile<T>(k, v, sizes_.dims, first, left < kDecodeKeys ? left : kDecodeKeys, room_.keys);
            attend(room_.panel, tile, sizes_.dims, rule_, nullptr, room_.tile);
        }
    }

    // In the thread's own panel: its memory was not lent to the partial results.
    void combine_all() {
        QueryPanel<T>& panel = own_;
        panel.lanes.resize(rows_);
        combine(memory_.partials, group_ * sizes_.splits, sizes_.splits, score_unit(rule_), panel);
        finish(panel);
    }

    void finish(QueryPanel<T>& panel) {
        const int64_t group = problem_.group_size(), head = key_head_ * group;
        for (int64_t i = 0; problem_.sink.present && i < rows_; ++i)
            room_.sinks[i] = head_number(problem_.sink, batch_, head + (row0_ + i) % group);
        finish_panel(panel, rule_, problem_.sink.present ? room_.sinks : nullptr, 1, 1.0, room_.lse);
        const int64_t* at = problem_.out.stride;
        store_output(panel, sizes_.dims,
                     GroupRows<T>{static_cast<T*>(problem_.out.data) + batch_ * at[0] + head * at[2], at[1], at[2], group, row0_});
        if (!problem_.lse.present) return;
        const RowStrides lse = lse_strides(problem_.lse);
        const GroupRows<A> to{static_cast<A*>(problem_.lse.data) + batch_ * lse.batch + head * lse.head, lse.row, lse.head, group, row0_};
        for (int64_t i = 0; i < rows_; ++i) *to(i) = room_.lse[i];
    }

    const DecodeProblem& problem_;
    const DecodeSizes& sizes_;
    const DecodeMemory<T>& memory_;
    DecodeRoom<T> room_;
    const int64_t group_, batch_, key_head_, row0_, rows_;
    QueryPanel<T> own_;
    ScoreRule<A> rule_;
};

// Products of whole vectors of lanes, for so many keys.
FLASH_INLINE double decode_flops(const DecodeProblem& problem, const DecodeSizes& sizes, double keys) {
    return 2 * keys * static_cast<double>(problem.heads_k * sizes.panels * sizes.width * (sizes.dims.qk + sizes.dims.v));
}

template <class T>
static Plan plan_decode_as(const DecodeProblem& problem) {
    const DecodeSizes sizes = DecodeSizes::of<T>(problem);
    Plan plan;
    plan.tile_q = static_cast<int>(sizes.rows < kPanelWidth ? sizes.rows : kPanelWidth);
    plan.tile_k = static_cast<int>(kDecodeKeys);
    plan.num_splits = sizes.splits;
    const double keys = static_cast<double>(problem.batch) * static_cast<double>(problem.cache.capacity);
    plan.threads = choose_threads(problem.request, sizes.groups * sizes.splits, decode_flops(problem, sizes, keys));
    plan.workspace_bytes = DecodeMemory<T>(problem, sizes, plan.threads, nullptr).bytes;
    return plan;
}

template <class T>
static void decode_as(const DecodeProblem& problem, const Plan& plan, void* workspace) {
    const DecodeSizes sizes = DecodeSizes::of<T>(problem);
    const DecodeMemory<T> memory(problem, sizes, plan.threads, workspace);
    const auto threads_for = [&](int64_t elements) { return elements < kSerialElements ? 1 : plan.threads; };
    append_new_keys(problem, threads_for(problem.batch * problem.seqlen_new * problem.heads_k * problem.head_dim));
    if (memory.turned)
        turn_queries(problem, memory.turned, threads_for(problem.batch * problem.seqlen_q * problem.heads_q * problem.head_dim));
    for (int64_t group = 0; memory.finished && group < sizes.groups; ++group) memory.finished[group] = 0;

    double keys = 0;
    for (int64_t b = 0; b < problem.batch; ++b) keys += static_cast<double>(problem.cached(b) + problem.seqlen_new);
    const int64_t items = sizes.groups * sizes.splits;
    const int threads = choose_threads(problem.request, items, decode_flops(problem, sizes, keys));
    run(items, threads < plan.threads ? threads : plan.threads, [&](int64_t item, int thread) {
        DecodeItem<T>(problem, sizes, memory, item / sizes.splits, thread).run(item % sizes.splits);
    });
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
