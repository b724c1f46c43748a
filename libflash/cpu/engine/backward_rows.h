// The shared workspace of the backward pass (LSE, delta and dQ accumulators of all query rows), and the passes over query rows:
// preparation of LSE and delta, rounding of dq, dsink.
#pragma once

#include "cpu/engine/gradient.h"
#include "cpu/engine/planning.h"
#include "cpu/engine/problem_rows.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

template <class A>
struct BackwardRows {
    int64_t heads = 0, query_tiles = 0, chunks = 0;  // query_tiles: as numbered by Tiling
    int64_t width = 0, channels = 0;                 // lanes of a query tile; channels of q
    A *lse = nullptr, *delta = nullptr;              // [head][query tile][lane]
    A* dq = nullptr;                                 // [chunk][head][query tile][channel][lane]

    BackwardRows(const AttentionProblem& problem, const Plan& plan, Arena& arena)
        : heads(problem.heads_q), query_tiles(Tiling(problem.q_rows, plan.tile_q).count()), chunks(plan.key_chunks),
          width(round_up(plan.tile_q, kLanes<A>)), channels(problem.head_dim) {
        lse = arena.allocate<A>(heads * query_tiles * width);
        delta = arena.allocate<A>(heads * query_tiles * width);
        dq = arena.allocate<A>(chunks * heads * query_tiles * channels * width);
    }
    int64_t at(int64_t head, int64_t query_tile) const { return (head * query_tiles + query_tile) * width; }
    A* dq_at(int64_t chunk, int64_t head, int64_t query_tile) const {
        return dq + ((chunk * heads + head) * query_tiles + query_tile) * channels * width;
    }
};

// One query tile of one head. `rows`: rows that exist (used length); `owned`: rows that belong to the sequence and must be
// written.
struct QueryTileRows {
    int64_t batch, head, query_tile, row0, rows, owned;
};

// Threads of the passes over query rows. They are limited by memory bandwidth: one thread for each 200000 elements.
FLASH_INLINE int row_threads(const AttentionProblem& problem, const Plan& plan, int64_t channels) {
    const int64_t rows = problem.q_rows.packed() ? problem.q_rows.capacity : problem.batch * problem.q_rows.capacity;
    const int64_t worth = rows * problem.heads_q * channels / 200000 + 1;
    return worth < plan.threads ? static_cast<int>(worth) : plan.threads;
}

// Calls body(QueryTileRows, thread) for every query tile of every head.
template <class Body>
static void for_query_tiles(const AttentionProblem& problem, const Plan& plan, const Body& body) {
    const Tiling tiling(problem.q_rows, plan.tile_q);
    const int64_t query_tiles = tiling.count();
    run_parallel(query_tiles * problem.heads_q, row_threads(problem, plan, problem.head_dim), [&](int64_t task, int thread) {
        const Tiling::Tile tile = tiling.at(task % query_tiles);
        if (tile.batch < 0) return;
        const auto cut = [&](int64_t length) {
            const int64_t left = length - tile.first_row;
            return left < 0 ? 0 : left < plan.tile_q ? left : plan.tile_q;
        };
        body(QueryTileRows{tile.batch, task / query_tiles, task % query_tiles, tile.first_row,
                           cut(problem.q_rows.length(tile.batch)), cut(problem.q_rows.owned(tile.batch))},
             thread);
    });
}

template <class T>
FLASH_INLINE Acc<T> dot(const T* a, const T* b, int64_t n) {
    Vec<Acc<T>> sum{};
    for (int64_t c = 0; c < n; c += kLanes<Acc<T>>) sum = multiply_add(load_part(a + c, n - c), load_part(b + c, n - c), sum);
    return sum_of_lanes<Acc<T>>(sum);
}

// delta = dout . out - dlse, unless an earlier call has computed it. Rows without a visible key get lse = +infinity and delta =
// 0, which makes all their terms 0.
template <class T>
static void prepare_row_statistics(const AttentionProblem& problem, const Plan& plan, const BackwardRows<Acc<T>>& rows) {
    using A = Acc<T>;
    for_query_tiles(problem, plan, [&](const QueryTileRows& at, int) {
        const auto out = rows_of<const T>(problem.out, problem.q_rows, at.batch, at.head);
        const auto dout = rows_of<const T>(problem.dout, problem.q_rows, at.batch, at.head);
        const auto lse = lse_rows_of<const A>(problem.lse, problem.q_rows, at.batch, at.head);
        const auto dlse = lse_rows_of<const A>(problem.dlse, problem.q_rows, at.batch, at.head);
        const auto delta = lse_rows_of<A>(problem.delta, problem.q_rows, at.batch, at.head);
        const bool known = problem.reads_delta && delta.data;
        A *to_lse = rows.lse + rows.at(at.head, at.query_tile), *to_delta = rows.delta + rows.at(at.head, at.query_tile);
        for (int64_t i = 0; i < rows.width; ++i) {
            const int64_t row = at.row0 + i;
            const bool sees = i < at.rows && *lse(row) != -kInfinity<A>;
            to_lse[i] = sees ? *lse(row) : kInfinity<A>;
            to_delta[i] = !sees   ? A(0)
                          : known ? *delta(row)
                                  : dot(dout(row), out(row), problem.head_dim_v) - (dlse.data ? *dlse(row) : A(0));
            if (delta.data && !known && i < at.owned) *delta(row) = to_delta[i];
        }
    });
}

// Sums the dQ accumulators of the chunks in a fixed order, multiplies by the scale and rounds. Rows beyond the used length
// become 0.
template <class T>
static void finish_dq(const AttentionProblem& problem, const Plan& plan, const BackwardRows<Acc<T>>& rows, int64_t chunk_keys) {
    using A = Acc<T>;
    for_query_tiles(problem, plan, [&](const QueryTileRows& at, int) {
        const ResultRows<T> dq(problem.dq, problem.q_rows, at.batch, at.head);
        const int64_t length_k = problem.k_rows.length(at.batch), rows_seeing = length_k > 0 ? at.rows : 0;
        for (int64_t i = rows_seeing; i < at.owned && !problem.adds; ++i) dq.clear(at.row0 + i, problem.head_dim);
        A* total = rows.dq_at(0, at.head, at.query_tile);
        const int64_t width = round_up(at.rows, kLanes<A>);
        for (int64_t chunk = 1; chunk < rows.chunks && chunk * chunk_keys < length_k; ++chunk) {
            const A* part = rows.dq_at(chunk, at.head, at.query_tile);
            for (int64_t n = 0; n < rows.channels * width; n += kLanes<A>) store(total + n, load(total + n) + load(part + n));
        }
        const Vec<A> scale = broadcast(static_cast<A>(problem.softmax_scale));
        transpose_columns<A>(
            total, width, rows_seeing, problem.head_dim, [&](int64_t r, int64_t c, Vec<A> v) __attribute__((always_inline)) {
                const int64_t left = problem.head_dim - c;
                problem.adds ? dq.add(at.row0 + r, c, v * scale, left) : dq.store(at.row0 + r, c, v * scale, left);
            });
    });
}

// dsink = -sum of exp(sink - lse) * delta over all rows of a head. One task per head, so the order of the sum does not depend on
// the threads.
template <class T>
static void compute_dsink(const AttentionProblem& problem, const Plan& plan, const BackwardRows<Acc<T>>& rows) {
    using A = Acc<T>;
    const Tiling tiling(problem.q_rows, plan.tile_q);
    run_parallel(problem.heads_q, row_threads(problem, plan, 16), [&](int64_t head, int) {
        double sum = 0;
        for (int64_t query_tile = 0; query_tile < rows.query_tiles; ++query_tile) {
            const Tiling::Tile tile = tiling.at(query_tile);
            if (tile.batch < 0) continue;
            const Vec<A> sink = broadcast(static_cast<A>(head_value(problem.sink, tile.batch, head)));
            for (int64_t i = 0; i < rows.width; i += kLanes<A>) {
                const Vec<A> lse = load(rows.lse + rows.at(head, query_tile) + i),
                             delta = load(rows.delta + rows.at(head, query_tile) + i);
                const Vec<A> p = exp<A>(minimum(Vec<A>{}, sink - lse));
                sum -= static_cast<double>(sum_of_lanes<A>(p == 0 ? Vec<A>{} : p * delta));
            }
        }
        store_as(problem.dsink.dtype, problem.dsink.data, head * problem.dsink.head_stride, sum);
    });
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
