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
class DecodeTask {
    using A = Acc<T>;

public:
    DecodeTask(const DecodeProblem& problem, const DecodeSizes& sizes, const DecodeMemory<T>& memory, int thread, int64_t batch,
               int64_t split)
        : problem_(problem), sizes_(sizes), memory_(memory), scratch_(memory.scratch(thread, sizes)), batch_(batch),
          split_(split), range_(sizes.ranges.range(split, problem.cached(batch) + problem.seqlen_new)) {
        rule_.set(problem);
    }

    // One query tile of one key head.
    void run_query_tile(int64_t key_head, int64_t number) {
        const TileCoordinates coordinates{key_head, number * kQueryTileRows, query_tile_rows(number),
                                          (batch_ * problem_.heads_k + key_head) * sizes_.query_tiles + number};
        QueryTile<T> query_tile = scratch_.query_tile;
        start(query_tile, coordinates);
        load_query_parts(query_tile, query_rows(coordinates), sizes_.parts);
        with_cache(key_head, [&](const auto& cached) __attribute__((always_inline)) {
            const KeyRange visible = query_tile.lanes.seen_by_any;
            for (int64_t first = visible.first; first < visible.last; first += kDecodeKeys) {
                cancellation_point();
                const int64_t left = visible.last - first, count = left < kDecodeKeys ? left : kDecodeKeys;
                add_finished_block(query_tile, first, sizes_.dims.v, 0, score_unit(rule_));
                if (sizes_.parts.plain)
                    attend(query_tile, load_cached_tile(cached, first, count), sizes_.dims, rule_, nullptr, scratch_.tile);
                else
                    attend_parts(query_tile, cached, sizes_.parts, sizes_.dims, first, count, rule_, scratch_.keys,
                                 scratch_.tile);
            }
        });
        end(query_tile, coordinates);
    }

    // All query rows of key heads first_head, first_head + 1, ... for a small number of query rows.
    void run_key_heads(int64_t first_head) {
        SmallQScratch<T>& small_q = scratch_.small_q;
        const int64_t left = problem_.heads_k - first_head;
        small_q.heads = left < sizes_.heads_per_task ? left : sizes_.heads_per_task;
        for (int64_t n = 0; n < small_q.heads; ++n) {
            start(small_q.query_tiles[n], coordinates_of(first_head + n));
            small_q.load_queries(query_rows(coordinates_of(first_head + n)), n);
        }
        with_cache(first_head, [&](const auto& cached) __attribute__((always_inline)) {
            small_q_loop_over_keys(small_q, cached, problem_.cache, sizes_.dims, rule_);
        });
        for (int64_t n = 0; n < small_q.heads; ++n) end(small_q.query_tiles[n], coordinates_of(first_head + n));
    }

private:
    struct TileCoordinates {
        int64_t key_head, row0, rows, index;
    };
    TileCoordinates coordinates_of(int64_t key_head) const {
        return {key_head, 0, sizes_.rows, batch_ * problem_.heads_k + key_head};
    }
    int64_t query_tile_rows(int64_t number) const {
        const int64_t left = sizes_.rows - number * kQueryTileRows;
        return left < kQueryTileRows ? left : kQueryTileRows;
    }

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

    GroupRows<const T> query_rows(const TileCoordinates& coordinates) const {
        const int64_t group = problem_.group_size(), head = coordinates.key_head * group;
        if (!memory_.rotated) {
            const int64_t* at = problem_.q.stride;
            return {static_cast<const T*>(problem_.q.data) + batch_ * at[0] + head * at[2], at[1], at[2], group,
                    coordinates.row0};
        }
        const int64_t dim = problem_.head_dim, position = problem_.heads_q * dim;
        return {memory_.rotated + batch_ * problem_.seqlen_q * position + head * dim, position, dim, group, coordinates.row0};
    }

    void start(QueryTile<T>& query_tile, const TileCoordinates& coordinates) const {
        if (sizes_.splits > 1) memory_.partials.attach(query_tile, coordinates.index * sizes_.splits + split_);
        set_lanes(query_tile.lanes, problem_, batch_, coordinates.key_head, coordinates.row0, coordinates.rows, range_);
    }

    void end(QueryTile<T>& query_tile, const TileCoordinates& coordinates) const {
        finish_totals(query_tile, sizes_.dims.v, sizes_.row_stride, score_unit(rule_));
        if (sizes_.splits == 1) return finish(query_tile, coordinates);
        const int64_t first = coordinates.index * sizes_.splits;
        memory_.partials.empty[first + split_] = query_tile.empty;
        if (__atomic_add_fetch(&memory_.finished[coordinates.index], 1, __ATOMIC_ACQ_REL) < sizes_.splits) return;
        QueryTile<T> whole = scratch_.query_tile;  // in the thread's own scratch memory, not in a partial result
        whole.lanes.resize(coordinates.rows);
        combine(memory_.partials, first, sizes_.splits, score_unit(rule_), sizes_.row_stride, whole);
        finish(whole, coordinates);
    }

    void finish(QueryTile<T>& query_tile, const TileCoordinates& coordinates) const {
        const int64_t group = problem_.group_size(), head = coordinates.key_head * group;
        for (int64_t i = 0; problem_.sink.present && i < coordinates.rows; ++i)
            scratch_.sinks[i] = head_value(problem_.sink, batch_, head + (coordinates.row0 + i) % group);
        finish_query_tile(query_tile, rule_, problem_.sink.present ? scratch_.sinks : nullptr, 1, 1.0, scratch_.lse);
        const int64_t* at = problem_.out.stride;
        T* out = static_cast<T*>(problem_.out.data) + batch_ * at[0] + head * at[2];
        const GroupRows<T> rows{out, at[1], at[2], group, coordinates.row0};
        sizes_.small_q() ? small_q_store(query_tile, sizes_.parts, rows) : store_output(query_tile, sizes_.dims, rows);
        if (!problem_.lse.present) return;
        const RowStrides lse = lse_strides(problem_.lse);
        A* first = static_cast<A*>(problem_.lse.data) + batch_ * lse.batch + head * lse.head;
        const GroupRows<A> to{first, lse.row, lse.head, group, coordinates.row0};
        for (int64_t i = 0; i < coordinates.rows; ++i) *to(i) = scratch_.lse[i];
    }

    const DecodeProblem& problem_;
    const DecodeSizes& sizes_;
    const DecodeMemory<T>& memory_;
    DecodeScratch<T> scratch_;
    const int64_t batch_, split_;
    const KeyRange range_;
    ScoreRule<A> rule_;
};

// Estimated cost of `keys` keys. For small query counts the time is that of reading the cache, which is about the cost of
// kSmallQRows rows.
FLASH_INLINE double decode_flops(const DecodeProblem& problem, const DecodeSizes& sizes, double keys) {
    const int64_t width = sizes.small_q() ? kSmallQRows : sizes.query_tiles * sizes.width;
    return 2 * keys * static_cast<double>(problem.heads_k * width * (sizes.dims.qk + sizes.dims.v));
}

template <class T>
static Plan plan_decode_as(const DecodeProblem& problem) {
    Plan plan;
    plan.most_threads = threads_or_default(problem.request.num_threads);
    const DecodeSizes sizes = decode_sizes<T>(problem, plan.most_threads);
    plan.tile_q = static_cast<int>(sizes.rows < kQueryTileRows ? sizes.rows : kQueryTileRows);
    plan.tile_k = static_cast<int>(kDecodeKeys);
    plan.num_splits = sizes.splits;
    const double keys = static_cast<double>(problem.batch) * static_cast<double>(problem.cache.capacity);
    plan.threads = choose_threads(plan.most_threads, sizes.tasks(problem), decode_flops(problem, sizes, keys));
    plan.workspace_bytes = DecodeMemory<T>(problem, sizes, plan.threads, nullptr).bytes;
    return plan;
}

template <class T>
static void decode_as(const DecodeProblem& problem, const Plan& plan, void* workspace) {
    const DecodeSizes sizes = decode_sizes<T>(problem, plan.most_threads);
    const DecodeMemory<T> memory(problem, sizes, plan.threads, workspace);
    const auto threads_for = [&](int64_t elements) { return elements < kSerialElements ? 1 : plan.threads; };
    append_new_keys(problem, threads_for(problem.batch * problem.seqlen_new * problem.heads_k * problem.head_dim));
    if (memory.rotated)
        rotate_queries(problem, memory.rotated,
                       threads_for(problem.batch * problem.seqlen_q * problem.heads_q * problem.head_dim));
    for (int64_t n = 0; memory.finished && n < sizes.all_query_tiles; ++n) memory.finished[n] = 0;

    double keys = 0;
    for (int64_t b = 0; b < problem.batch; ++b) keys += static_cast<double>(problem.cached(b) + problem.seqlen_new);
    const int threads = choose_threads(plan.most_threads, sizes.tasks(problem), decode_flops(problem, sizes, keys));
    // The heads of a range of keys are neighbouring tasks: their rows are neighbours in the cache.
    const int64_t tasks = sizes.tasks_of_split(problem);
    run_parallel(sizes.tasks(problem), threads < plan.threads ? threads : plan.threads, [&](int64_t task, int thread) {
        const int64_t n = task % tasks, split = task / tasks % sizes.splits, batch = task / tasks / sizes.splits;
        DecodeTask<T> one(problem, sizes, memory, thread, batch, split);
        sizes.small_q() ? one.run_key_heads(n * sizes.heads_per_task)
                        : one.run_query_tile(n / sizes.query_tiles, n % sizes.query_tiles);
    });
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
