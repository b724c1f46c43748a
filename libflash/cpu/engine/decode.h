// Decode: a few query rows of each sequence attend to its cache. The query heads that share a key head are rows of one query
// tile, so the cache is read once for all of them. Long caches are split into ranges of keys to occupy all threads. The thread
// that finishes the last split of a query tile combines the partial results, always in the same order.
#pragma once

#include "cpu/append.h"
#include "cpu/engine/decode_memory.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kSerialElements = 1 << 16;  // appended or rotated; fewer do not justify another thread

// One split of the keys of one sequence.
template <class T>
class DecodeItem {
    using A = Acc<T>;

public:
    DecodeItem(const DecodeProblem& problem, const DecodeSizes& sizes, const DecodeMemory<T>& memory, int thread, int64_t batch,
               int64_t split)
        : problem_(problem), sizes_(sizes), memory_(memory), room_(memory.room(thread, sizes)), batch_(batch), split_(split),
          range_(sizes.ranges.range(split, problem.cached(batch) + problem.seqlen_new)) {
        rule_.alibi = problem.alibi_slopes.present;
        rule_.set(problem.softmax_scale, problem.softcap);
    }

    // One query tile of one key head.
    void run_panel(int64_t key_head, int64_t number) {
        const Place place{key_head, number * kPanelWidth, panel_rows(number),
                          (batch_ * problem_.heads_k + key_head) * sizes_.panels + number};
        QueryPanel<T> panel = room_.panel;
        start(panel, place);
        panel.load_queries(query_rows(place), sizes_.dims);
        with_cache(key_head, [&](const auto& k, const auto& v) __attribute__((always_inline)) {
            const KeyRange some = panel.lanes.some;
            for (int64_t first = some.first; first < some.last; first += kDecodeKeys) {
                stop_point();
                const int64_t left = some.last - first, count = left < kDecodeKeys ? left : kDecodeKeys;
                fold_before(panel, first, sizes_.dims.v, 0, score_unit(rule_));
                attend(panel, load_key_tile<T>(k, v, sizes_.dims, first, count, room_.keys), sizes_.dims, rule_, nullptr,
                       room_.tile);
            }
        });
        end(panel, place);
    }

    // All query rows of key heads first_head, first_head + 1, ... for a small number of query rows.
    void run_heads(int64_t first_head) {
        FewRoom<T>& few = room_.few;
        const int64_t left = problem_.heads_k - first_head;
        few.heads = left < sizes_.heads_together ? left : sizes_.heads_together;
        for (int64_t n = 0; n < few.heads; ++n) {
            start(few.panels[n], place_of(first_head + n));
            few.load_queries(query_rows(place_of(first_head + n)), n, sizes_.dims);
        }
        with_cache(first_head, [&](const auto& k, const auto& v) __attribute__((always_inline)) {
            few_walk(few, k, v, problem_.cache.k.stride[2], problem_.cache.v.stride[2], sizes_.dims, rule_);
        });
        for (int64_t n = 0; n < few.heads; ++n) end(few.panels[n], place_of(first_head + n));
    }

private:
    struct Place {
        int64_t key_head, row0, rows, group;
    };
    Place place_of(int64_t key_head) const { return {key_head, 0, sizes_.rows, batch_ * problem_.heads_k + key_head}; }
    int64_t panel_rows(int64_t number) const {
        const int64_t left = sizes_.rows - number * kPanelWidth;
        return left < kPanelWidth ? left : kPanelWidth;
    }

    template <class Body>
    FLASH_INLINE void with_cache(int64_t head, const Body& body) const {
        const TensorView &k = problem_.cache.k, &v = problem_.cache.v;
        if (problem_.cache.paged())
            body(paged_rows<T>(problem_, k, batch_, head), paged_rows<T>(problem_, v, batch_, head));
        else
            body(entry_rows<T>(problem_, k, batch_, head), entry_rows<T>(problem_, v, batch_, head));
    }

    GroupRows<const T> query_rows(const Place& place) const {
        const int64_t group = problem_.group_size(), head = place.key_head * group;
        if (!memory_.turned) {
            const int64_t* at = problem_.q.stride;
            return {static_cast<const T*>(problem_.q.data) + batch_ * at[0] + head * at[2], at[1], at[2], group, place.row0};
        }
        const int64_t dim = problem_.head_dim, position = problem_.heads_q * dim;
        return {memory_.turned + batch_ * problem_.seqlen_q * position + head * dim, position, dim, group, place.row0};
    }

    void start(QueryPanel<T>& panel, const Place& place) const {
        if (sizes_.splits > 1) memory_.partials.lend(panel, place.group * sizes_.splits + split_);
        set_lanes(panel.lanes, problem_, batch_, place.key_head, place.row0, place.rows, range_);
    }

    void end(QueryPanel<T>& panel, const Place& place) const {
        end_folds(panel, sizes_.dims.v, sizes_.row_stride, score_unit(rule_));
        if (sizes_.splits == 1) return finish(panel, place);
        const int64_t first = place.group * sizes_.splits;
        memory_.partials.empty[first + split_] = panel.empty;
        if (__atomic_add_fetch(&memory_.finished[place.group], 1, __ATOMIC_ACQ_REL) < sizes_.splits) return;
        QueryPanel<T> whole = room_.panel;  // in the thread's own scratch memory, not in a partial result
        whole.lanes.resize(place.rows);
        combine(memory_.partials, first, sizes_.splits, score_unit(rule_), sizes_.row_stride, whole);
        finish(whole, place);
    }

    void finish(QueryPanel<T>& panel, const Place& place) const {
        const int64_t group = problem_.group_size(), head = place.key_head * group;
        for (int64_t i = 0; problem_.sink.present && i < place.rows; ++i)
            room_.sinks[i] = head_number(problem_.sink, batch_, head + (place.row0 + i) % group);
        finish_panel(panel, rule_, problem_.sink.present ? room_.sinks : nullptr, 1, 1.0, room_.lse);
        const int64_t* at = problem_.out.stride;
        T* out = static_cast<T*>(problem_.out.data) + batch_ * at[0] + head * at[2];
        const GroupRows<T> rows{out, at[1], at[2], group, place.row0};
        sizes_.few() ? few_store(panel, sizes_.dims, rows) : store_output(panel, sizes_.dims, rows);
        if (!problem_.lse.present) return;
        const RowStrides lse = lse_strides(problem_.lse);
        A* first = static_cast<A*>(problem_.lse.data) + batch_ * lse.batch + head * lse.head;
        const GroupRows<A> to{first, lse.row, lse.head, group, place.row0};
        for (int64_t i = 0; i < place.rows; ++i) *to(i) = room_.lse[i];
    }

    const DecodeProblem& problem_;
    const DecodeSizes& sizes_;
    const DecodeMemory<T>& memory_;
    DecodeRoom<T> room_;
    const int64_t batch_, split_;
    const KeyRange range_;
    ScoreRule<A> rule_;
};

// The cost of the products with `keys` keys. With few query rows the time is that of reading the cache: kSmallQRows stands for
// it.
FLASH_INLINE double decode_flops(const DecodeProblem& problem, const DecodeSizes& sizes, double keys) {
    const int64_t width = sizes.few() ? kFewRows : sizes.panels * sizes.width;
    return 2 * keys * static_cast<double>(problem.heads_k * width * (sizes.dims.qk + sizes.dims.v));
}

template <class T>
static Plan plan_decode_as(const DecodeProblem& problem) {
    Plan plan;
    plan.most_threads = threads_or_default(problem.request.num_threads);
    const DecodeSizes sizes = decode_sizes<T>(problem, plan.most_threads);
    plan.tile_q = static_cast<int>(sizes.rows < kPanelWidth ? sizes.rows : kPanelWidth);
    plan.tile_k = static_cast<int>(kDecodeKeys);
    plan.num_splits = sizes.splits;
    const double keys = static_cast<double>(problem.batch) * static_cast<double>(problem.cache.capacity);
    plan.threads = choose_threads(plan.most_threads, sizes.items(problem), decode_flops(problem, sizes, keys));
    plan.workspace_bytes = DecodeMemory<T>(problem, sizes, plan.threads, nullptr).bytes;
    return plan;
}

template <class T>
static void decode_as(const DecodeProblem& problem, const Plan& plan, void* workspace) {
    const DecodeSizes sizes = decode_sizes<T>(problem, plan.most_threads);
    const DecodeMemory<T> memory(problem, sizes, plan.threads, workspace);
    const auto threads_for = [&](int64_t elements) { return elements < kSerialElements ? 1 : plan.threads; };
    append_new_keys(problem, threads_for(problem.batch * problem.seqlen_new * problem.heads_k * problem.head_dim));
    if (memory.turned)
        turn_queries(problem, memory.turned, threads_for(problem.batch * problem.seqlen_q * problem.heads_q * problem.head_dim));
    for (int64_t group = 0; memory.finished && group < sizes.groups; ++group) memory.finished[group] = 0;

    double keys = 0;
    for (int64_t b = 0; b < problem.batch; ++b) keys += static_cast<double>(problem.cached(b) + problem.seqlen_new);
    const int threads = choose_threads(plan.most_threads, sizes.items(problem), decode_flops(problem, sizes, keys));
    // The heads of a range of keys are neighbouring tasks: their rows are neighbours in the cache.
    const int64_t items = sizes.items_of_range(problem);
    run(sizes.items(problem), threads < plan.threads ? threads : plan.threads, [&](int64_t item, int thread) {
        const int64_t n = item % items, split = item / items % sizes.splits, batch = item / items / sizes.splits;
        DecodeItem<T> one(problem, sizes, memory, thread, batch, split);
        sizes.few() ? one.run_heads(n * sizes.heads_together) : one.run_panel(n / sizes.panels, n % sizes.panels);
    });
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
