// The tangent of the backward pass: the tasks and loops of backward.h with GradientTangentWork in place of GradientWork.
// `outputs` is the problem with the tangents in place of dq, dk, dv, dbias and dsink. The gradients themselves, if they are
// wanted, come from backward_as().
#pragma once

#include "cpu/engine/backward.h"
#include "cpu/engine/gradient_tangent.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

FLASH_INLINE AttentionProblem with_tangent_outputs(const TangentProblem& problem) {
    AttentionProblem outputs = problem;
    outputs.dq = problem.tangents.dq, outputs.dk = problem.tangents.dk, outputs.dv = problem.tangents.dv;
    outputs.dbias = problem.tangents.dbias;
    outputs.dsink = problem.tangents.dsink;
    return outputs;
}

// LSE, delta, their tangents (mu and tdelta), and the accumulators of the tangent of dq.
template <class A>
struct TangentRows : BackwardRows<A> {
    A *mu = nullptr, *tdelta = nullptr;

    TangentRows(const TangentProblem& problem, const Plan& plan, Arena& arena) : BackwardRows<A>(problem, plan, arena) {
        mu = arena.allocate<A>(this->heads * this->query_tiles * this->width);
        tdelta = arena.allocate<A>(this->heads * this->query_tiles * this->width);
    }
};

template <class T>
struct BackwardTangentScratch : BackwardScratch<T> {
    using A = Acc<T>;
    using E = Element<T>;
    TangentOperands<T> tangents;
    GradientScratch<T> tangent_tile;
    A *tanh = nullptr, *tbias = nullptr;
    E *tk = nullptr, *tv = nullptr, *tk_elements = nullptr;

    BackwardTangentScratch(const TangentProblem& problem, const Plan& plan, Arena& arena)
        : BackwardScratch<T>(with_tangent_outputs(problem), plan, arena) {
        const HeadDims dims{problem.head_dim, problem.head_dim_v};
        const int64_t tiles = tiles_per_block(problem, plan), keys = tiles * plan.tile_k;
        const int64_t width = round_up(plan.tile_q, kLanes<A>);
        tangents.lay_out(arena, problem.tangents, dims, width);
        tangent_tile.lay_out(arena, plan.tile_k, false, false, false, width);
        if (problem.softcap > 0) tanh = arena.allocate<A>(plan.tile_k * width);
        if (problem.tangents.bias.present) tbias = arena.allocate<A>(plan.tile_k * width);
        if (problem.tangents.k.present) tk = arena.allocate<E>(keys * elements_for<T>(dims.qk));
        if (problem.tangents.v.present) tv = arena.allocate<E>(keys * elements_for<T>(dims.v));
        if (kPaired<T> && problem.tangents.k.present)
            tk_elements = arena.allocate<E>(tiles * elements_for<T>(plan.tile_k) * dims.qk);
    }
    GradientTangentScratch<T> tile_scratch() const { return {this->tile, tangent_tile, tanh, tbias}; }
};

// mu and tdelta of all rows. tdelta = tdout . out + dout . tout - tdlse, unless it is given.
template <class T>
static void prepare_row_tangents(const TangentProblem& problem, const Plan& plan, const TangentRows<Acc<T>>& rows) {
    using A = Acc<T>;
    const Tangents& given = problem.tangents;
    for_query_tiles(problem, plan, [&](const QueryTileRows& at, int) {
        const auto out = rows_of<const T>(problem.out, problem.q_rows, at.batch, at.head);
        const auto dout = rows_of<const T>(problem.dout, problem.q_rows, at.batch, at.head);
        const auto tout = rows_of<const T>(given.out, problem.q_rows, at.batch, at.head);
        const auto tdout = rows_of<const T>(given.dout, problem.q_rows, at.batch, at.head);
        const auto tlse = lse_rows_of<const A>(given.lse, problem.q_rows, at.batch, at.head);
        const auto tdlse = lse_rows_of<const A>(given.dlse, problem.q_rows, at.batch, at.head);
        const auto tdelta = lse_rows_of<const A>(given.delta, problem.q_rows, at.batch, at.head);
        const int64_t first = rows.at(at.head, at.query_tile), n = problem.head_dim_v;
        for (int64_t i = 0; i < rows.width; ++i) {
            const int64_t row = at.row0 + i;
            rows.mu[first + i] = rows.tdelta[first + i] = 0;
            if (i >= at.rows || rows.lse[first + i] == kInfinity<A>) continue;
            rows.mu[first + i] = *tlse(row);
            A sum = 0;
            if (tdelta.data) {
                sum = *tdelta(row);
            } else {
                sum = dot(dout(row), tout(row), n) - (tdlse.data ? *tdlse(row) : A(0));
                if (tdout.data) sum += dot(tdout(row), out(row), n);
            }
            rows.tdelta[first + i] = sum;
        }
    });
}

// The tangent of dsink = -sum of p_sink * delta, with the tasks of compute_dsink().
template <class T>
static void compute_dsink_tangent(const TangentProblem& problem, const Plan& plan, const TangentRows<Acc<T>>& rows) {
    const Tiling tiling(problem.q_rows, plan.tile_q);
    const HeadTensor& to = problem.tangents.dsink;
    run_parallel(problem.heads_q, row_threads(problem, plan, 16), [&](int64_t head, int) {
        const double sink = head_value(problem.sink, 0, head);
        const double tsink = problem.tangents.sink.present ? head_value(problem.tangents.sink, 0, head) : 0.0;
        double sum = 0;
        for (int64_t query_tile = 0; query_tile < rows.query_tiles; ++query_tile) {
            if (tiling.at(query_tile).batch < 0) continue;
            const int64_t first = rows.at(head, query_tile);
            for (int64_t i = first; i < first + rows.width; ++i) {
                const double above = sink - static_cast<double>(rows.lse[i]);
                const double p = __builtin_exp(above > 0 ? 0.0 : above);
                if (p != 0) sum -= p * ((tsink - static_cast<double>(rows.mu[i])) * rows.delta[i] + rows.tdelta[i]);
            }
        }
        store_as(to.dtype, to.data, head * to.head_stride, sum);
    });
}

// Loads the tangents of q and dout for the rows of the lanes. `with_rows`: also in rows, for products that sum over queries.
template <class T>
static void load_tangent_operands(const TangentProblem& problem, int64_t batch, int64_t head, const TangentRows<Acc<T>>& rows,
                                  int64_t tile, HeadDims dims, bool with_rows, BackwardTangentScratch<T>& scratch) {
    const Lanes<Acc<T>>& lanes = scratch.query_tile.lanes;
    auto tq = rows_of<const T>(problem.tangents.q, problem.q_rows, batch, head);
    auto tdout = rows_of<const T>(problem.tangents.dout, problem.q_rows, batch, head);
    if (tq.data) tq.data = tq(lanes.row0);
    if (tdout.data) tdout.data = tdout(lanes.row0);
    scratch.tangents.load(lanes, tq, tdout, dims, with_rows);
    scratch.tangents.mu = rows.mu + rows.at(head, tile);
    scratch.tangents.delta = rows.tdelta + rows.at(head, tile);
}

// The work of a task: see GradientWork.
template <class T>
class GradientTangentWork {
    using A = Acc<T>;
    using E = Element<T>;

public:
    GradientTangentWork(const TangentProblem& problem, const Plan& plan, const TangentRows<A>& rows,
                        BackwardTangentScratch<T>& scratch, int64_t batch, int64_t key_head)
        : problem_(problem), plan_(plan), rows_(rows), scratch_(scratch), batch_(batch), key_head_(key_head),
          dims_{problem.head_dim, problem.head_dim_v}, first_query_tile_(Tiling(problem.q_rows, plan.tile_q).first_tile(batch)),
          gradients_(problem, plan, rows, scratch, batch, key_head) {}

    Lanes<A>& lanes() { return gradients_.lanes(); }

    void load_block(KeyRange keys) {
        gradients_.load_block(keys);
        const auto tk = rows_of<const T>(problem_.tangents.k, problem_.k_rows, batch_, key_head_);
        const auto tv = rows_of<const T>(problem_.tangents.v, problem_.k_rows, batch_, key_head_);
        if (tk.data) {
            const Reads reads = kPaired<T> ? Reads::once : Reads::often;
            tk_ = rows_operand<T>(tk, keys.first, keys.count(), dims_.qk, scratch_.tk, reads);
            if constexpr (kPaired<T>) pack_key_elements<T>(tk, keys, plan_.tile_k, dims_.qk, scratch_.tk_elements);
        }
        if (tv.data) tv_ = rows_operand<T>(tv, keys.first, keys.count(), dims_.v, scratch_.tv, Reads::once);
    }

    void load_query_tile(int64_t head, int64_t number) {
        gradients_.load_query_tile(head, number);
        load_tangent_operands<T>(problem_, batch_, head, rows_, first_query_tile_ + number, dims_, true, scratch_);
    }

    void add(GradientKeyTile<T> tile, int64_t offset, const ScoreRule<A>& rule, const DropoutMask* dropout, A* dq) {
        gradients_.set_operands_of(tile, offset);
        GradientKeyTile<T> tangents;
        set_operands(tangents, tk_, tv_, scratch_.tk_elements, offset, plan_.tile_k, dims_.qk);
        TangentKeyOperands<T> tkeys;
        if (tk_.data) tkeys.k = tangents.k, tkeys.k_elements = tangents.k_elements;
        if (tv_.data) tkeys.v = tangents.v;
        add_gradient_tangents(problem_.tangents, scratch_.query_tile, scratch_.tangents, tile, tkeys, dims_, rule, dropout,
                              scratch_.tile_scratch(), dq);
    }

private:
    const TangentProblem& problem_;
    const Plan& plan_;
    const TangentRows<A>& rows_;
    BackwardTangentScratch<T>& scratch_;
    const int64_t batch_, key_head_;
    const HeadDims dims_;
    const int64_t first_query_tile_;
    GradientWork<T> gradients_;
    Operand<E> tk_, tv_;
};

// tds of one tile, for the tangent of dbias: see DbiasGradients.
template <class T>
class GradientTangentsOfScores {
    using A = Acc<T>;

public:
    GradientTangentsOfScores(const TangentProblem& problem, const Plan& plan, const TangentRows<A>& rows,
                             const BackwardTangentScratch<T>& scratch)
        : problem_(problem), plan_(plan), rows_(rows), scratch_(scratch), dims_{problem.head_dim, problem.head_dim_v} {}

    Lanes<A>& lanes() { return scratch_.query_tile.lanes; }
    A* sums() { return scratch_.bias_sums; }

    void load_query_tile(int64_t batch, int64_t head) {
        load_query_rows<T>(problem_, plan_, rows_, batch, head, dims_, scratch_.query_tile);
        const int64_t number = Tiling(problem_.q_rows, plan_.tile_q).first_tile(batch) + lanes().row0 / plan_.tile_q;
        load_tangent_operands<T>(problem_, batch, head, rows_, number, dims_, false, scratch_);
    }

    const A* of_tile(int64_t batch, int64_t head, const ScoreRule<A>& rule, int64_t first, int64_t count) {
        const int64_t key_head = head / problem_.group_size();
        const auto rows = [&](const TensorView& of) { return rows_of<const T>(of, problem_.k_rows, batch, key_head); };
        GradientKeyTile<T> tile;
        tile.first = first, tile.count = count;
        tile.k = rows_operand<T>(rows(problem_.k), first, count, dims_.qk, scratch_.k, Reads::once);
        tile.v = rows_operand<T>(rows(problem_.v), first, count, dims_.v, scratch_.v, Reads::once);
        TangentKeyOperands<T> tkeys;
        const Tangents& given = problem_.tangents;
        if (given.k.present) tkeys.k = rows_operand<T>(rows(given.k), first, count, dims_.qk, scratch_.tk, Reads::once);
        if (given.v.present) tkeys.v = rows_operand<T>(rows(given.v), first, count, dims_.v, scratch_.tv, Reads::once);
        const DropoutMask dropout(problem_, batch, head, SequencePositions(problem_, batch));
        score_gradient_tangents<false>(given, scratch_.query_tile, scratch_.tangents, tile, tkeys, dims_, rule,
                                       problem_.dropout.active() ? &dropout : nullptr, scratch_.tile_scratch());
        return scratch_.tangent_tile.dp;
    }

private:
    const TangentProblem& problem_;
    const Plan& plan_;
    const TangentRows<A>& rows_;
    BackwardTangentScratch<T> scratch_;
    const HeadDims dims_;
};

template <class T>
static Plan plan_backward_tangent_as(const TangentProblem& problem) {
    Plan plan = plan_key_tasks<TangentRows<Acc<T>>, BackwardTangentScratch<T>>(problem, 5.5);
    if (!problem.with_gradients()) return plan;
    // backward_as() runs first, with the same plan and workspace.
    Arena rows(nullptr), scratch(nullptr);
    BackwardRows<Acc<T>>(problem, plan, rows);
    BackwardScratch<T>(problem, plan, scratch);
    const size_t bytes = rows.used() + scratch.used() * static_cast<size_t>(plan.threads);
    if (bytes > plan.workspace_bytes) plan.workspace_bytes = bytes;
    return plan;
}

template <class T>
static void backward_tangent_as(const TangentProblem& problem, const Plan& plan, void* workspace) {
    using Scratch = BackwardTangentScratch<T>;
    if (problem.with_gradients()) backward_as<T>(problem, plan, workspace);
    const AttentionProblem outputs = with_tangent_outputs(problem);
    Arena shared(workspace);
    const TangentRows<Acc<T>> rows(problem, plan, shared);
    const auto scratch_of = [&](int thread) {
        return scratch_of_thread<Scratch>(problem, plan, workspace, shared.used(), thread);
    };
    prepare_row_statistics<T>(problem, plan, rows);
    prepare_row_tangents<T>(problem, plan, rows);
    run_key_tasks(problem, plan, [&](int64_t batch, int64_t key_head, int64_t chunk, KeyRange keys, int thread) {
        Scratch scratch = scratch_of(thread);
        GradientTangentWork<T> work(problem, plan, rows, scratch, batch, key_head);
        BackwardTask<T, GradientTangentWork<T>>(outputs, plan, rows, scratch, work, batch, key_head, chunk).run(keys);
    });
    finish_dq<T>(outputs, plan, rows, chunk_keys(problem, plan));
    if (outputs.dsink.present) compute_dsink_tangent<T>(problem, plan, rows);
    if (outputs.dbias.present) {
        compute_dbias<T>(outputs, plan,
                         [&](int thread) { return GradientTangentsOfScores<T>(problem, plan, rows, scratch_of(thread)); });
    }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
