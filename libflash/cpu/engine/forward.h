// The forward pass. A task is up to kMostQueryTiles query tiles of one head; it loops over the key tiles that any of them sees.
#pragma once

#include "cpu/engine/attend.h"
#include "cpu/engine/planning.h"
#include "cpu/engine/problem_rows.h"
#include "cpu/engine/statistics.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kMostQueryTiles = 4;

// With a block mask no tile may cross a block boundary.
FLASH_INLINE void choose_forward_tiles(const AttentionProblem& problem, Plan& plan) {
    plan.tile_q = static_cast<int>(tile_size(problem, problem.q_rows, problem.request.tile_q, kQueryTileRows, kQueryTileRows));
    plan.tile_k = static_cast<int>(tile_size(problem, problem.k_rows, problem.request.tile_k, kForwardKeys, 512));
}

// The number of query tiles of a task. They share each key tile, which is packed once for all of them. There are as many as leave
// several tasks per thread and fit the L2 cache. The bits of a row do not depend on this number.
FLASH_INLINE int64_t query_tiles_per_task(const AttentionProblem& problem, const Plan& plan) {
    const int64_t query_tiles = Tiling(problem.q_rows, plan.tile_q).count() * problem.heads_q;
    int64_t most = problem.head_dim + problem.head_dim_v > 512 ? 2 : kMostQueryTiles;
    while (most > 1 && query_tiles < most * 8 * plan.threads) most /= 2;
    return most;
}

template <class T>
struct ForwardScratch {
    QueryTile<T> query_tiles[kMostQueryTiles];
    BlockMaskRow blocks[kMostQueryTiles];
    KeyTileScratch<T> keys;
    TileScratch<T> tile;
    Acc<T>* lse;
    // FLASH_FLAG_CONTINUE: LSE of the earlier result, and its share of the new one.
    double* earlier_lse = nullptr;
    Acc<T>* earlier_weight = nullptr;

    ForwardScratch(const AttentionProblem& problem, const Plan& plan, Arena& arena) {
        const HeadDims dims{problem.head_dim, problem.head_dim_v};
        const int64_t width = round_up(plan.tile_q, kLanes<Acc<T>>);
        for (int64_t p = 0; p < query_tiles_per_task(problem, plan); ++p)
            query_tiles[p].lay_out(arena, dims, problem.k_rows.max_length, width, problem.entropy.present);
        keys.lay_out(arena, dims, plan.tile_k);
        tile.lay_out(arena, plan.tile_k, problem.bias.present || problem.mask.present, width);
        lse = arena.allocate<Acc<T>>(kQueryTileRows);
        if (!problem.continues) return;
        earlier_lse = arena.allocate<double>(kQueryTileRows);
        earlier_weight = arena.allocate<Acc<T>>(kQueryTileRows);
    }
};

template <class T>
class ForwardTask {
    using A = Acc<T>;

public:
    ForwardTask(const AttentionProblem& problem, const Plan& plan, ForwardScratch<T>& scratch, int64_t batch, int64_t head)
        : problem_(problem), plan_(plan), scratch_(scratch), batch_(batch), head_(head),
          dims_{problem.head_dim, problem.head_dim_v}, rule_(score_rule<A>(problem, batch, head)),
          dropout_(problem, batch, head, SequencePositions(problem, batch)), out_(problem.out, problem.q_rows, batch, head),
          lse_(lse_rows_of<A>(problem.lse, problem.q_rows, batch, head)), statistics_(problem, batch, head) {}

    void run(int64_t row0, int64_t rows) {
        const int64_t length = problem_.q_rows.length(batch_), end = row0 + rows;
        start_query_tiles(row0, length < end ? length : end);
        loop_over_keys();
        for (int64_t p = 0; p < query_tiles_; ++p) finish(scratch_.query_tiles[p]);
        for (int64_t row = length > row0 ? length : row0; row < end; ++row) clear_row(row);
    }

private:
    void start_query_tiles(int64_t row0, int64_t end) {
        const StridedRows<const T> q = rows_of<const T>(problem_.q, problem_.q_rows, batch_, head_);
        query_tiles_ = 0;
        for (int64_t row = row0; row < end; row += plan_.tile_q, ++query_tiles_) {
            QueryTile<T>& query_tile = scratch_.query_tiles[query_tiles_];
            set_lanes(query_tile.lanes, problem_, batch_, head_, row, end - row < plan_.tile_q ? end - row : plan_.tile_q);
            query_tile.load_queries(StridedRows<const T>{q(row), q.stride}, dims_);
            scratch_.blocks[query_tiles_] = BlockMaskRow(problem_.block_mask, batch_, head_, row / FLASH_BLOCK_SIZE);
        }
    }

    KeyRange keys_seen() const {
        KeyRange seen{INT64_MAX, 0};
        for (int64_t p = 0; p < query_tiles_; ++p) {
            const KeyRange& visible = scratch_.query_tiles[p].lanes.seen_by_any;
            if (visible.empty()) continue;
            if (visible.first < seen.first) seen.first = visible.first;
            if (visible.last > seen.last) seen.last = visible.last;
        }
        return seen;
    }

    void loop_over_keys() {
        const int64_t key_head = head_ / problem_.group_size();
        const auto k = rows_of<const T>(problem_.k, problem_.k_rows, batch_, key_head);
        const auto v = rows_of<const T>(problem_.v, problem_.k_rows, batch_, key_head);
        const KeyRange seen = keys_seen();
        for (int64_t first = seen.empty() ? seen.last : seen.first / plan_.tile_k * plan_.tile_k; first < seen.last;
             first += plan_.tile_k) {
            cancellation_point();
            const int64_t left = seen.last - first;
            KeyTile<T> tile;
            for (int64_t p = 0; p < query_tiles_; ++p) {
                QueryTile<T>& query_tile = scratch_.query_tiles[p];
                if (first + plan_.tile_k <= query_tile.lanes.seen_by_any.first || first >= query_tile.lanes.seen_by_any.last)
                    continue;
                if (!scratch_.blocks[p].kept(first / FLASH_BLOCK_SIZE)) continue;
                if (tile.count == 0)
                    tile = load_key_tile<T>(k, v, dims_, first, left < plan_.tile_k ? left : plan_.tile_k, scratch_.keys);
                KeyTile<T> part = tile;
                if (query_tile.lanes.seen_by_any.last - first < part.count)
                    part.count = query_tile.lanes.seen_by_any.last - first;
                add_finished_block(query_tile, first, dims_.v, score_unit(rule_));
                attend(query_tile, part, dims_, rule_, problem_.dropout.active() ? &dropout_ : nullptr, scratch_.tile);
            }
        }
    }

    void finish(QueryTile<T>& query_tile) {
        finish_totals(query_tile, dims_.v, score_unit(rule_));
        const double kept = problem_.dropout.active() ? dropout_.kept : 1.0;
        const int64_t row0 = query_tile.lanes.row0;
        if (statistics_.wanted()) write_statistics(query_tile);
        if (problem_.continues) {
            for (int64_t i = 0; i < query_tile.lanes.rows; ++i) scratch_.earlier_lse[i] = static_cast<double>(*lse_(row0 + i));
            finish_query_tile(query_tile, rule_, scratch_.earlier_lse, 1, kept, scratch_.lse, scratch_.earlier_weight);
        } else {
            double sink = 0;
            if (problem_.sink.present) sink = head_value(problem_.sink, batch_, head_);
            finish_query_tile(query_tile, rule_, problem_.sink.present ? &sink : nullptr, 0, kept, scratch_.lse);
        }
        store_rows(query_tile);
        if (lse_.data)
            for (int64_t i = 0; i < query_tile.lanes.rows; ++i) *lse_(row0 + i) = scratch_.lse[i];
    }

    void write_statistics(const QueryTile<T>& query_tile) const {
        const double unit = rule_.plain ? rule_.exact_scale : 1.0;
        const double sink = problem_.sink.present ? head_value(problem_.sink, batch_, head_) : -kInfinity<double>;
        statistics_.write(query_tile.softmax, query_tile.lanes.row0, query_tile.lanes.rows, unit, sink);
    }

    void store_rows(QueryTile<T>& query_tile) {
        const int64_t row0 = query_tile.lanes.row0, rows = query_tile.lanes.rows;
        if (query_tile.empty) {  // the result for earlier keys stays
            for (int64_t i = 0; i < rows; ++i)
                if (!problem_.continues || scratch_.earlier_weight[i] == 0) out_.clear(row0 + i, dims_.v);
            return;
        }
        scale_output(query_tile, dims_);
        transpose_columns<A>(query_tile.o, query_tile.lanes.width, rows, dims_.v,
                             [&](int64_t r, int64_t c, Vec<A> v) __attribute__((always_inline)) {
                                 const int64_t left = dims_.v - c;
                                 if (problem_.continues && scratch_.earlier_weight[r] != 0)
                                     v += broadcast(scratch_.earlier_weight[r]) * out_.load(row0 + r, c, left);
                                 out_.store(row0 + r, c, v, left);
                             });
    }

    void clear_row(int64_t row) {
        out_.clear(row, dims_.v);
        if (lse_.data) *lse_(row) = -kInfinity<A>;
        statistics_.clear(row);
    }

    const AttentionProblem& problem_;
    const Plan& plan_;
    ForwardScratch<T>& scratch_;
    const int64_t batch_, head_;
    const HeadDims dims_;
    const ScoreRule<A> rule_;
    const DropoutMask dropout_;
    const ResultRows<T> out_;
    const StridedRows<A> lse_;
    const Statistics<A> statistics_;
    int64_t query_tiles_ = 0;
};

template <class T>
static Plan plan_forward_as(const AttentionProblem& problem) {
    Plan plan;
    choose_forward_tiles(problem, plan);
    const int64_t query_tiles = Tiling(problem.q_rows, plan.tile_q).count() * problem.heads_q;
    plan.most_threads = threads_or_default(problem.request.num_threads);
    plan.threads = choose_threads(plan.most_threads, query_tiles, attention_flops(problem, 1));
    Arena arena(nullptr);
    ForwardScratch<T> scratch(problem, plan, arena);
    plan.workspace_bytes = arena.used() * static_cast<size_t>(plan.threads);
    return plan;
}

// Calls body(arena, tile, head, rows) for each task. The task has `rows` rows, from tile.first_row on. The arena is the thread's
// part of the workspace.
template <class Body>
FLASH_INLINE void run_query_tasks(const AttentionProblem& problem, const Plan& plan, void* workspace, const Body& body) {
    const int64_t task_rows = plan.tile_q * query_tiles_per_task(problem, plan);
    const Tiling tiling(problem.q_rows, task_rows);
    const int64_t tiles = tiling.count();
    run_parallel(tiles * problem.heads_q, plan.threads, [&](int64_t task, int thread) {
        // Late query tiles first: with a causal mask they take longest.
        const int64_t head = task / tiles;
        const Tiling::Tile tile = tiling.at(tiles - 1 - task % tiles);
        if (tile.batch < 0) return;
        const size_t bytes = plan.workspace_bytes / static_cast<size_t>(plan.threads);
        Arena arena(static_cast<char*>(workspace) + bytes * static_cast<size_t>(thread));
        const int64_t left = problem.q_rows.owned(tile.batch) - tile.first_row;
        body(arena, tile, head, left < task_rows ? left : task_rows);
    });
}

template <class T>
static void forward_as(const AttentionProblem& problem, const Plan& plan, void* workspace) {
    start_head_maxima<Acc<T>>(problem);
    run_query_tasks(problem, plan, workspace, [&](Arena& arena, const Tiling::Tile& tile, int64_t head, int64_t rows) {
        ForwardScratch<T> scratch(problem, plan, arena);
        ForwardTask<T>(problem, plan, scratch, tile.batch, head).run(tile.first_row, rows);
    });
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
