// The tangent of the forward pass: alone, from given LSE and out (from_lse), or together with forward. Tasks as in forward.h.
#pragma once

#include "cpu/engine/attend_tangent.h"
#include "cpu/engine/forward.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

template <class T>
struct ForwardTangentScratch {
    using E = Element<T>;
    TangentQueryTile<T> query_tiles[kMostQueryTiles];
    BlockMaskRow blocks[kMostQueryTiles];
    KeyTileScratch<T> keys, tkeys;
    TangentTileScratch<T> tile;
    Acc<T>* lse;

    ForwardTangentScratch(const TangentProblem& problem, const Plan& plan, Arena& arena) {
        const HeadDims dims{problem.head_dim, problem.head_dim_v};
        const int64_t width = round_up(plan.tile_q, kLanes<Acc<T>>);
        for (int64_t p = 0; p < query_tiles_per_task(problem, plan); ++p)
            query_tiles[p].lay_out(arena, dims, problem.from_lse, problem.k_rows.max_length, width);
        keys.lay_out(arena, dims, plan.tile_k);
        tkeys.lay_out(arena, dims, plan.tile_k);
        tile.lay_out(arena, problem, plan.tile_k, width);
        lse = arena.allocate<Acc<T>>(kQueryTileRows);
    }
};

template <class T>
class ForwardTangentTask {
    using A = Acc<T>;

public:
    ForwardTangentTask(const TangentProblem& problem, const Plan& plan, ForwardTangentScratch<T>& scratch, int64_t batch,
                       int64_t head)
        : problem_(problem), plan_(plan), scratch_(scratch), batch_(batch), head_(head), key_head_(head / problem.group_size()),
          dims_{problem.head_dim, problem.head_dim_v}, rule_(score_rule<A>(problem, batch, head)),
          dropout_(problem, batch, head, SequencePositions(problem, batch)),
          step_{problem, dims_, rule_, problem.dropout.active() ? &dropout_ : nullptr, scratch.tile},
          out_(rows_of<T>(problem.out, problem.q_rows, batch, head)),
          tout_(rows_of<T>(problem.tangents.out, problem.q_rows, batch, head)),
          dout_(rows_of<const T>(problem.dout, problem.q_rows, batch, head)),
          tdout_(rows_of<const T>(problem.tangents.dout, problem.q_rows, batch, head)),
          lse_(lse_rows_of<A>(problem.lse, problem.q_rows, batch, head)),
          tlse_(lse_rows_of<A>(problem.tangents.lse, problem.q_rows, batch, head)),
          dlse_(lse_rows_of<const A>(problem.dlse, problem.q_rows, batch, head)),
          tdlse_(lse_rows_of<const A>(problem.tangents.dlse, problem.q_rows, batch, head)),
          delta_(lse_rows_of<A>(problem.delta, problem.q_rows, batch, head)),
          tdelta_(lse_rows_of<A>(problem.tangents.delta, problem.q_rows, batch, head)) {}

    void run(int64_t row0, int64_t rows) {
        const int64_t length = problem_.q_rows.length(batch_), end = row0 + rows;
        start_query_tiles(row0, length < end ? length : end);
        loop_over_keys();
        for (int64_t p = 0; p < query_tiles_; ++p) finish(scratch_.query_tiles[p]);
        for (int64_t row = length > row0 ? length : row0; row < end; ++row) clear_row(row);
    }

private:
    void start_query_tiles(int64_t row0, int64_t end) {
        const auto q = rows_of<const T>(problem_.q, problem_.q_rows, batch_, head_);
        const auto tq = rows_of<const T>(problem_.tangents.q, problem_.q_rows, batch_, head_);
        query_tiles_ = 0;
        for (int64_t row = row0; row < end; row += plan_.tile_q, ++query_tiles_) {
            TangentQueryTile<T>& query_tile = scratch_.query_tiles[query_tiles_];
            Lanes<A>& lanes = query_tile.tile.lanes;
            set_lanes(lanes, problem_, batch_, head_, row, end - row < plan_.tile_q ? end - row : plan_.tile_q);
            query_tile.tile.load_queries(StridedRows<const T>{q(row), q.stride}, dims_);
            if (tq.data)
                pack_columns<T>(StridedRows<const T>{tq(row), tq.stride}, lanes.rows, lanes.width, dims_.qk, query_tile.tq);
            query_tile.start();
            if (problem_.from_lse) read_lse(query_tile);
            scratch_.blocks[query_tiles_] = BlockMaskRow(problem_.block_mask, batch_, head_, row / FLASH_BLOCK_SIZE);
        }
    }

    // Row maxima of 0 give all blocks of the blocked sums the weight 1.
    void read_lse(TangentQueryTile<T>& query_tile) {
        const Lanes<A>& lanes = query_tile.tile.lanes;
        for (int64_t i = 0; i < lanes.width; ++i) {
            const A lse = i < lanes.rows ? *lse_(lanes.row0 + i) : -kInfinity<A>;
            query_tile.lse[i] = lse == -kInfinity<A> ? kInfinity<A> : lse;
            query_tile.tile.softmax.row_max[i] = 0;
        }
    }

    KeyRange keys_seen() const {
        KeyRange seen{INT64_MAX, 0};
        for (int64_t p = 0; p < query_tiles_; ++p) {
            const KeyRange& visible = scratch_.query_tiles[p].tile.lanes.seen_by_any;
            if (visible.empty()) continue;
            if (visible.first < seen.first) seen.first = visible.first;
            if (visible.last > seen.last) seen.last = visible.last;
        }
        return seen;
    }

    TangentKeyTile<T> load_keys(int64_t first, int64_t count) {
        const auto k = rows_of<const T>(problem_.k, problem_.k_rows, batch_, key_head_);
        const auto v = rows_of<const T>(problem_.v, problem_.k_rows, batch_, key_head_);
        const auto tk = rows_of<const T>(problem_.tangents.k, problem_.k_rows, batch_, key_head_);
        const auto tv = rows_of<const T>(problem_.tangents.v, problem_.k_rows, batch_, key_head_);
        TangentKeyTile<T> keys{load_key_tile<T>(k, v, dims_, first, count, scratch_.keys), {}, {}};
        if (tk.data) keys.tk = rows_operand<T>(tk, first, count, dims_.qk, scratch_.tkeys.k, Reads::once);
        if (tv.data) keys.tv = row_elements_operand<T>(tv, first, count, dims_.v, scratch_.tkeys.v);
        return keys;
    }

    void loop_over_keys() {
        const KeyRange seen = keys_seen();
        const int64_t channels = TangentQueryTile<T>::channels(dims_, problem_.from_lse);
        for (int64_t first = seen.empty() ? seen.last : seen.first / plan_.tile_k * plan_.tile_k; first < seen.last;
             first += plan_.tile_k) {
            cancellation_point();
            const int64_t left = seen.last - first;
            TangentKeyTile<T> keys;
            for (int64_t p = 0; p < query_tiles_; ++p) {
                TangentQueryTile<T>& query_tile = scratch_.query_tiles[p];
                const KeyRange& visible = query_tile.tile.lanes.seen_by_any;
                if (first + plan_.tile_k <= visible.first || first >= visible.last) continue;
                if (!scratch_.blocks[p].kept(first / FLASH_BLOCK_SIZE)) continue;
                if (keys.tile.count == 0) keys = load_keys(first, left < plan_.tile_k ? left : plan_.tile_k);
                TangentKeyTile<T> part = keys;
                if (visible.last - first < part.tile.count) part.tile.count = visible.last - first;
                add_finished_block(query_tile.tile, first, channels, score_unit(rule_));
                step_.attend(query_tile, part);
            }
        }
    }

    void finish(TangentQueryTile<T>& query_tile) {
        QueryTile<T>& tile = query_tile.tile;
        const int64_t channels = TangentQueryTile<T>::channels(dims_, problem_.from_lse), width = tile.lanes.width;
        finish_totals(tile, channels, score_unit(rule_));
        if (tile.empty) std::memset(static_cast<void*>(tile.o), 0, static_cast<size_t>(channels * width) * sizeof(A));
        finish_rows(query_tile);
        store_rows(query_tile);
    }

    // Leaves in softmax.rescale the factor of the sums (0 for rows without a visible key), in query_tile.lse and .mu the results,
    // and in r the difference mu - pivot.
    void finish_rows(TangentQueryTile<T>& query_tile) {
        QueryTile<T>& tile = query_tile.tile;
        const double kept = problem_.dropout.active() ? dropout_.kept : 1.0;
        const bool has_sink = problem_.sink.present;
        const double sink = has_sink ? head_value(problem_.sink, batch_, head_) : -kInfinity<double>;
        const double tsink = problem_.tangents.sink.present ? head_value(problem_.tangents.sink, batch_, head_) : 0.0;
        if (!problem_.from_lse) finish_query_tile(tile, rule_, has_sink ? &sink : nullptr, 0, kept, scratch_.lse);
        A* r = step_.sums(query_tile, 1);
        for (int64_t i = 0; i < tile.lanes.rows; ++i) {
            const A lse = problem_.from_lse ? query_tile.lse[i] : scratch_.lse[i];
            const bool sees = lse != (problem_.from_lse ? kInfinity<A> : -kInfinity<A>);
            if (problem_.from_lse) tile.softmax.rescale[i] = sees ? static_cast<A>(kept) : A(0);
            const double weight = problem_.from_lse ? 1.0 : static_cast<double>(tile.softmax.rescale[i]) / kept;
            double below = static_cast<double>(r[i]) * weight;
            if (weight == 0) below = 0;  // r may be NaN
            const double p_sink = sees ? __builtin_exp(sink > lse ? 0.0 : sink - static_cast<double>(lse)) : 0.0;
            if (p_sink > 0) below += p_sink * (tsink - static_cast<double>(query_tile.pivot[i]));
            r[i] = static_cast<A>(below);
            query_tile.lse[i] = sees ? lse : -kInfinity<A>;
            query_tile.mu[i] = sees ? static_cast<A>(static_cast<double>(query_tile.pivot[i]) + below) : A(0);
        }
        for (int64_t i = tile.lanes.rows; i < tile.lanes.width; ++i) tile.softmax.rescale[i] = r[i] = 0;
    }

    void store_rows(TangentQueryTile<T>& query_tile) {
        QueryTile<T>& tile = query_tile.tile;
        const int64_t width = tile.lanes.width, row0 = tile.lanes.row0, rows = tile.lanes.rows;
        A *acc = step_.acc(query_tile), *tacc = step_.tacc(query_tile), *r = step_.sums(query_tile, 1);
        for (int64_t c = 0; c < dims_.v; ++c)
            for (int64_t i = 0; i < width; i += kLanes<A>) {
                const Vec<A> factor = load(tile.softmax.rescale + i), below = load(r + i);
                A* to = tacc + c * width + i;
                Vec<A> tangent = load(to) * factor;
                if (!problem_.from_lse) {
                    const Vec<A> value = load(acc + c * width + i) * factor;
                    store(acc + c * width + i, factor == 0 ? Vec<A>{} : value);  // the sums may be NaN: 0 * NaN is not 0
                    tangent -= below * value;
                }
                store(to, factor == 0 ? Vec<A>{} : tangent);
            }
        A *delta = tile.softmax.row_max, *tdelta = tile.softmax.row_sum;  // row_max and row_sum are no longer needed
        for (int64_t i = 0; i < width; ++i) delta[i] = tdelta[i] = 0;
        const auto dot = [&](const StridedRows<const T>& of, int64_t row, int64_t c, Vec<A> v) __attribute__((always_inline)) {
            return of.data ? sum_of_lanes<A>(load_part(of(row0 + row) + c, dims_.v - c) * v) : A(0);
        };
        const auto add_out = [&](int64_t row, int64_t c, Vec<A> v) __attribute__((always_inline)) {
            if (delta_.data) delta[row] += dot(dout_, row, c, v);
            if (tdelta_.data) tdelta[row] += dot(tdout_, row, c, v);
        };
        if (!problem_.from_lse)
            transpose_columns<A>(acc, width, rows, dims_.v, [&](int64_t row, int64_t c, Vec<A> v) __attribute__((always_inline)) {
                store_part(out_(row0 + row) + c, v, dims_.v - c);
                add_out(row, c, v);
            });
        transpose_columns<A>(tacc, width, rows, dims_.v, [&](int64_t row, int64_t c, Vec<A> v) __attribute__((always_inline)) {
            if (problem_.from_lse && tile.softmax.rescale[row] != 0) {
                const Vec<A> out = load_part(out_(row0 + row) + c, dims_.v - c);
                v -= broadcast(r[row]) * out;
                add_out(row, c, out);
            }
            if (tout_.data) store_part(tout_(row0 + row) + c, v, dims_.v - c);
            if (tdelta_.data) tdelta[row] += dot(dout_, row, c, v);
        });
        for (int64_t i = 0; i < rows; ++i) {
            const A lse = query_tile.lse[i];
            const int64_t row = row0 + i;
            const bool counts = lse != -kInfinity<A>;
            if (!problem_.from_lse && lse_.data) *lse_(row) = lse;
            if (tlse_.data) *tlse_(row) = query_tile.mu[i];
            if (delta_.data) *delta_(row) = counts ? delta[i] - (dlse_.data ? *dlse_(row) : A(0)) : A(0);
            if (tdelta_.data) *tdelta_(row) = counts ? tdelta[i] - (tdlse_.data ? *tdlse_(row) : A(0)) : A(0);
        }
    }

    void clear_row(int64_t row) {
        if (!problem_.from_lse) {
            std::memset(static_cast<void*>(out_(row)), 0, static_cast<size_t>(dims_.v) * sizeof(T));
            if (lse_.data) *lse_(row) = -kInfinity<A>;
        }
        if (tout_.data) std::memset(static_cast<void*>(tout_(row)), 0, static_cast<size_t>(dims_.v) * sizeof(T));
        if (tlse_.data) *tlse_(row) = 0;
        if (delta_.data) *delta_(row) = 0;
        if (tdelta_.data) *tdelta_(row) = 0;
    }

    const TangentProblem& problem_;
    const Plan& plan_;
    ForwardTangentScratch<T>& scratch_;
    const int64_t batch_, head_, key_head_;
    const HeadDims dims_;
    const ScoreRule<A> rule_;
    const DropoutMask dropout_;
    const TangentStep<T> step_;
    const StridedRows<T> out_, tout_;
    const StridedRows<const T> dout_, tdout_;
    const StridedRows<A> lse_, tlse_;
    const StridedRows<const A> dlse_, tdlse_;
    const StridedRows<A> delta_, tdelta_;
    int64_t query_tiles_ = 0;
};

template <class T>
static Plan plan_forward_tangent_as(const TangentProblem& problem) {
    Plan plan;
    choose_forward_tiles(problem, plan);
    const int64_t query_tiles = Tiling(problem.q_rows, plan.tile_q).count() * problem.heads_q;
    plan.most_threads = threads_or_default(problem.request.num_threads);
    plan.threads = choose_threads(plan.most_threads, query_tiles, attention_flops(problem, problem.from_lse ? 2.5 : 3));
    Arena arena(nullptr);
    ForwardTangentScratch<T> scratch(problem, plan, arena);
    plan.workspace_bytes = arena.used() * static_cast<size_t>(plan.threads);
    return plan;
}

template <class T>
static void forward_tangent_as(const TangentProblem& problem, const Plan& plan, void* workspace) {
    run_query_tasks(problem, plan, workspace, [&](Arena& arena, const Tiling::Tile& tile, int64_t head, int64_t rows) {
        ForwardTangentScratch<T> scratch(problem, plan, arena);
        ForwardTangentTask<T>(problem, plan, scratch, tile.batch, head).run(tile.first_row, rows);
    });
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
