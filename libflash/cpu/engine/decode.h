// Decode: a few query rows of each sequence attend to its cache. The query heads that share a key head are rows of one query
// tile, so the cache is read once for all of them. Long caches are split into ranges of keys to occupy all threads. The thread
// that finishes the last split of a query tile combines the partial results, always in the same order.
#pragma once

#include "cpu/append.h"
#include "cpu/engine/decode_memory.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kSerialElements = 1 << 16;  // appended or rotated; fewer do not justify another thread

// One split of the keys of one sequence, for one row block.
template <class T>
class DecodeTask {
    using A = Acc<T>;

public:
    DecodeTask(const DecodeProblem& problem, const DecodePart<T>& part, const DecodeMemory<T>& memory, int thread, int64_t number,
               int64_t split)
        : problem_(problem), part_(part), sizes_(part.sizes), memory_(memory), scratch_(memory.scratch(thread, part.sizes)),
          number_(number), split_(split), block_(part.block(number)), batch_(block_.batch), keys_(problem, batch_),
          range_(sizes_.ranges.range(split, problem.rows_k(batch_))) {
        rule_.set(problem);
        if (keys_.has_gaps()) rule_.gaps = &keys_, rule_.group = problem.group_size();
    }

    // One query tile of one key head.
    void run_query_tile(int64_t key_head) {
        QueryTile<T> query_tile = scratch_.query_tile;
        start(query_tile, key_head);
        load_query_parts(query_tile, query_rows(key_head), sizes_.parts);
        with_cache(key_head, [&](const auto& cached) __attribute__((always_inline)) {
            const KeyRange visible = query_tile.lanes.seen_by_any;
            for (int64_t first = visible.first; first < visible.last; first += kDecodeKeys) {
                cancellation_point();
                const int64_t left = visible.last - first, count = left < kDecodeKeys ? left : kDecodeKeys;
                add_finished_block(query_tile, first, sizes_.dims.v, score_unit(rule_));
                if (sizes_.parts.plain)
                    attend(query_tile, load_cached_tile(cached, first, count), sizes_.dims, rule_, nullptr, scratch_.tile);
                else
                    attend_parts(query_tile, cached, sizes_.parts, sizes_.dims, first, count, rule_, scratch_.keys,
                                 scratch_.tile);
            }
        });
        finish_totals(query_tile, sizes_.dims.v, score_unit(rule_));
        end(query_tile, key_head);
    }

    // The query rows of the block of key heads first_head, first_head + 1, ..., with vectors along the channels.
    void run_key_heads(int64_t first_head) {
        SmallQScratch<T>& small_q = scratch_.small_q;
        const int64_t left = problem_.heads_k - first_head;
        small_q.heads = left < sizes_.heads_per_task ? left : sizes_.heads_per_task;
        small_q.rows = block_.rows;
        for (int64_t n = 0; n < small_q.heads; ++n) {
            start(small_q.query_tiles[n], first_head + n);
            small_q.load_queries(query_rows(first_head + n), n);
        }
        with_cache(first_head, [&](const auto& cached) __attribute__((always_inline)) {
            small_q_loop_over_keys(small_q, cached, problem_.cache, sizes_.dims, rule_);
        });
        for (int64_t n = 0; n < small_q.heads; ++n) end(small_q.query_tiles[n], first_head + n);
    }

private:
    template <class Body>
    FLASH_INLINE void with_cache(int64_t head, const Body& body) const {
        with_cache_type(problem_.cache.dtype, [&](auto* type) __attribute__((always_inline)) {
            using C = std::remove_pointer_t<decltype(type)>;
            if constexpr (std::is_same_v<C, T>) {
                if (problem_.cache.paged())
                    body(paged_head<T, T>(problem_, batch_, head));
                else
                    body(entry_head<T>(problem_, batch_, head));
            } else if constexpr (sizeof(C) == 1 && !std::is_same_v<T, double>) {
                body(paged_head<T, C>(problem_, batch_, head));
            }
        });
    }
    template <class Cached>
    FLASH_INLINE KeyTile<T> load_cached_tile(const Cached& cached, int64_t first, int64_t count) const {
        return {first, count, cached_rows_operand<T>(cached.k, first, count, sizes_.dims.qk, scratch_.keys.k),
                cached_row_elements_operand<T>(cached.v, first, count, sizes_.dims.v, scratch_.keys.v)};
    }

    GroupRows<const T> query_rows(int64_t key_head) const {
        const int64_t group = problem_.group_size(), head = key_head * group;
        if (!memory_.rotated) {
            const RowStrides at = row_strides(problem_.q);
            const T* first = static_cast<const T*>(problem_.q.data) + batch_ * at.batch + problem_.q_rows.start(batch_) * at.row;
            return {first + head * at.head, at.row, at.head, group, block_.row0};
        }
        const int64_t dim = problem_.head_dim, position = problem_.heads_q * dim;
        return {memory_.rotated + problem_.q_rows.before(batch_) * position + head * dim, position, dim, group, block_.row0};
    }

    // Number of a query tile, counted by [row block][key head]. Its partial results have `splits` consecutive numbers.
    int64_t index(int64_t key_head) const { return number_ * problem_.heads_k + key_head; }

    void start(QueryTile<T>& query_tile, int64_t key_head) const {
        if (sizes_.splits > 1) part_.partials.attach(query_tile, index(key_head) * sizes_.splits + split_);
        set_lanes(query_tile.lanes, problem_, keys_, batch_, key_head, block_.row0, block_.rows, range_);
    }

    void end(QueryTile<T>& query_tile, int64_t key_head) const {
        if (sizes_.splits == 1) return finish(query_tile, key_head);
        const int64_t first = index(key_head) * sizes_.splits;
        part_.partials.empty[first + split_] = query_tile.empty;
        if (__atomic_add_fetch(&part_.finished[index(key_head)], 1, __ATOMIC_ACQ_REL) < sizes_.splits) return;
        QueryTile<T> whole = scratch_.query_tile;  // in the thread's own scratch memory, not in a partial result
        whole.lanes.resize(block_.rows);
        if (sizes_.small_q())
            fold(first, whole);
        else
            combine(part_.partials, first, sizes_.splits, score_unit(rule_), sizes_.dims.v, whole);
        finish(whole, key_head);
    }

    // combine() with vectors along the channels: adds the partial results from number `first` on in ascending order.
    void fold(int64_t first, QueryTile<T>& whole) const {
        const Partials<T>& parts = part_.partials;
        whole.softmax.start(whole.lanes.width);
        for (int64_t s = first; s < first + sizes_.splits; ++s)
            for (int64_t r = 0; r < block_.rows; ++r)
                fold_segment(whole.softmax.row_max + r, whole.softmax.row_sum + r, whole.o + r * sizes_.row_stride,
                             parts.row_max[s * parts.width + r], parts.row_sum[s * parts.width + r],
                             parts.o + s * parts.elements + r * sizes_.row_stride, sizes_.row_stride, score_unit(rule_));
    }

    void finish(QueryTile<T>& query_tile, int64_t key_head) const {
        const int64_t group = problem_.group_size(), head = key_head * group, start = problem_.q_rows.start(batch_);
        for (int64_t i = 0; problem_.sink.present && i < block_.rows; ++i)
            scratch_.sinks[i] = head_value(problem_.sink, batch_, head + (block_.row0 + i) % group);
        finish_query_tile(query_tile, rule_, problem_.sink.present ? scratch_.sinks : nullptr, 1, 1.0, scratch_.lse);
        if (problem_.out.dtype == problem_.dtype)
            store<T>(query_tile, head, start);
        else if constexpr (sizeof(T) == 2)
            store<float>(query_tile, head, start);
        if (!problem_.lse.present) return;
        const RowStrides lse = lse_strides(problem_.lse);
        A* first = static_cast<A*>(problem_.lse.data) + batch_ * lse.batch + start * lse.row + head * lse.head;
        const GroupRows<A> to{first, lse.row, lse.head, group, block_.row0};
        for (int64_t i = 0; i < block_.rows; ++i) *to(i) = scratch_.lse[i];
    }

    // Stores the rows of a query tile to an output of type R.
    template <class R>
    void store(QueryTile<T>& query_tile, int64_t head, int64_t start) const {
        const RowStrides at = row_strides(problem_.out);
        R* out = static_cast<R*>(problem_.out.data) + batch_ * at.batch + start * at.row + head * at.head;
        const GroupRows<R> rows{out, at.row, at.head, problem_.group_size(), block_.row0};
        sizes_.small_q() ? small_q_store(query_tile, sizes_.parts, rows) : store_output(query_tile, sizes_.dims, rows);
    }

    const DecodeProblem& problem_;
    const DecodePart<T>& part_;
    const DecodeSizes& sizes_;
    const DecodeMemory<T>& memory_;
    DecodeScratch<T> scratch_;
    const int64_t number_, split_;
    const RowBlock block_;
    const int64_t batch_;
    const SequenceKeys keys_;
    const KeyRange range_;
    ScoreRule<A> rule_;
};

// Estimated floating-point operations for `keys` keys and one row block. With few rows the time is that of reading the cache,
// which is about the cost of kSmallQRows rows.
FLASH_INLINE double decode_flops(const DecodeProblem& problem, const DecodeSizes& sizes, double keys) {
    const int64_t width = sizes.few_rows ? kSmallQRows : sizes.width;
    return 2 * keys * static_cast<double>(problem.heads_k * width * (sizes.dims.qk + sizes.dims.v));
}

template <class T>
static Plan plan_decode_as(const DecodeProblem& problem) {
    Plan plan;
    plan.most_threads = threads_or_default(problem.request.num_threads);
    const DecodeMemory<T> sizes(problem, plan.most_threads, 0, nullptr);
    plan.tile_k = static_cast<int>(kDecodeKeys);
    double flops = 0;
    int64_t tasks = 0;
    for (const DecodePart<T>* part : {&sizes.many_rows, &sizes.few_rows}) {
        if (part->sizes.most_rows > plan.tile_q) plan.tile_q = static_cast<int>(part->sizes.most_rows);
        if (part->sizes.splits > plan.num_splits) plan.num_splits = part->sizes.splits;
        tasks += part->sizes.tasks(problem);
        const double keys = static_cast<double>(part->sizes.blocks) * static_cast<double>(problem.cache.capacity);
        flops += decode_flops(problem, part->sizes, keys);
    }
    if (problem.invariant_rows) plan.segment = sizes.few_rows.sizes.segment;
    plan.threads = choose_threads(plan.most_threads, tasks, flops);
    plan.workspace_bytes = DecodeMemory<T>(problem, plan.most_threads, plan.threads, nullptr).bytes;
    return plan;
}

template <class T>
static double flops_of_call(const DecodeProblem& problem, const DecodePart<T>& part) {
    double keys = 0;
    for (int64_t n = 0; n < part.blocks; ++n) keys += static_cast<double>(problem.rows_k(part.block(n).batch));
    return decode_flops(problem, part.sizes, keys);
}

// Task `n` of a part. For few rows, neighbouring tasks process the heads of one range of keys, which are neighbours in the cache.
// Otherwise neighbouring tasks process the row blocks of a sequence, which share the keys of a head.
template <class T>
static void run_decode_task(const DecodeProblem& problem, const DecodePart<T>& part, const DecodeMemory<T>& memory, int thread,
                            int64_t n) {
    const DecodeSizes& sizes = part.sizes;
    if (sizes.few_rows) {
        const int64_t heads = sizes.head_tasks(problem), split = n / heads % sizes.splits;
        DecodeTask<T>(problem, part, memory, thread, n / heads / sizes.splits, split)
            .run_key_heads(n % heads * sizes.heads_per_task);
    } else {
        const int64_t split = n / part.blocks % sizes.splits;
        const int64_t head = n / part.blocks / sizes.splits;
        DecodeTask<T> task(problem, part, memory, thread, n % part.blocks, split);
        sizes.small_q() ? task.run_key_heads(head) : task.run_query_tile(head);
    }
}

template <class T>
static void decode_as(const DecodeProblem& problem, const Plan& plan, void* workspace) {
    DecodeMemory<T> memory(problem, plan.most_threads, plan.threads, workspace);
    const auto threads_for = [&](int64_t elements) { return elements < kSerialElements ? 1 : plan.threads; };
    append_new_keys(problem, threads_for(problem.new_rows.total() * problem.heads_k * problem.head_dim));
    if (memory.rotated)
        rotate_queries(problem, memory.rotated, threads_for(problem.q_rows.total() * problem.heads_q * problem.head_dim));
    memory.many_rows.start(problem);
    memory.few_rows.start(problem);
    const int64_t many = memory.many_rows.tasks(problem), tasks = many + memory.few_rows.tasks(problem);
    const double flops = flops_of_call(problem, memory.many_rows) + flops_of_call(problem, memory.few_rows);
    const int threads = choose_threads(plan.most_threads, tasks, flops);
    run_parallel(tasks, threads < plan.threads ? threads : plan.threads, [&](int64_t task, int thread) {
        if (task < many)
            run_decode_task(problem, memory.many_rows, memory, thread, task);
        else
            run_decode_task(problem, memory.few_rows, memory, thread, task - many);
    });
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
