// dbias, in a pass of its own. A task owns one tile of dbias and sums, in a fixed order, the contributions of all batch entries,
// heads, rows and keys that share it. This recomputes two matrix products, but needs no buffer beyond one tile, and no two
// threads write the same element.
#pragma once

#include "cpu/engine/backward_rows.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// One dimension of dbias and how it is divided into tasks.
struct DbiasAxis {
    bool is_broadcast;  // size 1, broadcast along this dimension
    int64_t size, step;
    int64_t tasks() const { return is_broadcast ? 1 : (size + step - 1) / step; }
    // The indices in [0, extent) that task `at` sums.
    KeyRange positions(int64_t at, int64_t extent) const {
        if (is_broadcast) return {0, extent};
        const int64_t last = (at + 1) * step;
        return {at * step, last < extent ? last : extent};
    }
    // The number of elements that task `at` writes.
    int64_t elements(int64_t at) const { return is_broadcast ? 1 : size - at * step < step ? size - at * step : step; }
};

// Loads the query tile of the lanes as operands of products that sum over channels, with its LSE and delta.
template <class T>
static void load_query_rows(const AttentionProblem& problem, const Plan& plan, const BackwardRows<Acc<T>>& rows, int64_t batch,
                            int64_t head, HeadDims dims, GradientQueryTile<T>& query_tile) {
    const auto q = rows_of<const T>(problem.q, problem.q_rows, batch, head);
    const auto dout = rows_of<const T>(problem.dout, problem.q_rows, batch, head);
    const int64_t row0 = query_tile.lanes.row0;
    query_tile.load(StridedRows<const T>{q(row0), q.stride}, StridedRows<const T>{dout(row0), dout.stride}, dims, false);
    const int64_t number = Tiling(problem.q_rows, plan.tile_q).first_tile(batch) + row0 / plan.tile_q;
    query_tile.lse = rows.lse + rows.at(head, number);
    query_tile.delta = rows.delta + rows.at(head, number);
}

// The gradients of the scores of one tile. GradientTangentsOfScores (backward_tangent.h) has the same functions.
template <class T, class Scratch>
class DbiasGradients {
    using A = Acc<T>;

public:
    DbiasGradients(const AttentionProblem& problem, const Plan& plan, const BackwardRows<A>& rows, const Scratch& scratch)
        : problem_(problem), plan_(plan), rows_(rows), scratch_(scratch), tile_(scratch.tile),
          dims_{problem.head_dim, problem.head_dim_v} {
        tile_.slope = nullptr;
    }

    Lanes<A>& lanes() { return scratch_.query_tile.lanes; }
    A* sums() { return scratch_.bias_sums; }

    void load_query_tile(int64_t batch, int64_t head) {
        load_query_rows<T>(problem_, plan_, rows_, batch, head, dims_, scratch_.query_tile);
    }

    // The score gradients of keys first to first + count - 1, [key][lane].
    const A* of_tile(int64_t batch, int64_t head, const ScoreRule<A>& rule, int64_t first, int64_t count) {
        const int64_t key_head = head / problem_.group_size();
        const auto k = rows_of<const T>(problem_.k, problem_.k_rows, batch, key_head);
        const auto v = rows_of<const T>(problem_.v, problem_.k_rows, batch, key_head);
        GradientKeyTile<T> tile;
        tile.first = first, tile.count = count;
        tile.k = rows_operand<T>(k, first, count, dims_.qk, scratch_.k, Reads::once);
        tile.v = rows_operand<T>(v, first, count, dims_.v, scratch_.v, Reads::once);
        const DropoutMask dropout(problem_, batch, head, SequencePositions(problem_, batch));
        score_gradients<false>(scratch_.query_tile, tile, dims_, rule, problem_.dropout.active() ? &dropout : nullptr, tile_);
        return tile_.dp;
    }

private:
    const AttentionProblem& problem_;
    const Plan& plan_;
    const BackwardRows<A>& rows_;
    Scratch scratch_;
    GradientScratch<T> tile_;  // without slope: bias is added after the softcap
    const HeadDims dims_;
};

template <class T, class Gradients>
class DbiasTask {
    using A = Acc<T>;

public:
    DbiasTask(const AttentionProblem& problem, const Plan& plan, Gradients& gradients, const DbiasAxis (&axes)[4])
        : problem_(problem), plan_(plan), gradients_(gradients), axes_(axes) {}

    void run(const int64_t (&at)[4]) {
        const int64_t keys = axes_[3].elements(at[3]);
        for (int64_t n = 0; n < keys * kQueryTileRows; ++n) gradients_.sums()[n] = 0;
        const KeyRange batches = axes_[0].positions(at[0], problem_.batch), heads = axes_[1].positions(at[1], problem_.heads_q);
        for (int64_t batch = batches.first; batch < batches.last; ++batch)
            for (int64_t head = heads.first; head < heads.last; ++head) add_head(batch, head, at[2], at[3]);
        write(at, keys);
    }

private:
    void add_head(int64_t batch, int64_t head, int64_t at_row, int64_t at_key) {
        const ScoreRule<A> rule = score_rule<A>(problem_, batch, head);
        const KeyRange range = axes_[2].positions(at_row, problem_.q_rows.length(batch));
        for (int64_t row0 = range.first; row0 < range.last; row0 += plan_.tile_q) {
            const int64_t left = range.last - row0;
            set_lanes(gradients_.lanes(), problem_, batch, head, row0, left < plan_.tile_q ? left : plan_.tile_q);
            add_query_tile(batch, head, rule, axes_[3].positions(at_key, problem_.k_rows.length(batch)));
        }
    }

    void add_query_tile(int64_t batch, int64_t head, const ScoreRule<A>& rule, KeyRange keys) {
        cancellation_point();
        const Lanes<A>& lanes = gradients_.lanes();
        BlockMaskRow blocks(problem_.block_mask, batch, head, lanes.row0 / FLASH_BLOCK_SIZE);
        bool loaded = false;
        for (int64_t first = keys.first; first < keys.last; first += plan_.tile_k) {
            const int64_t left = keys.last - first, count = left < plan_.tile_k ? left : plan_.tile_k;
            if (first >= lanes.seen_by_any.last || first + count <= lanes.seen_by_any.first) continue;
            if (!blocks.kept(first / FLASH_BLOCK_SIZE)) continue;
            if (!loaded) gradients_.load_query_tile(batch, head);
            loaded = true;
            add_tile(batch, head, rule, first, count);
        }
    }

    void add_tile(int64_t batch, int64_t head, const ScoreRule<A>& rule, int64_t first, int64_t count) {
        const int64_t width = gradients_.lanes().width;
        const A* tile = gradients_.of_tile(batch, head, rule, first, count);
        for (int64_t j = 0; j < count; ++j) {
            A* sums = gradients_.sums() + (axes_[3].is_broadcast ? 0 : j * kQueryTileRows);
            for (int64_t i = 0; i < width; i += kLanes<A>) store(sums + i, load(sums + i) + load(tile + j * width + i));
        }
    }

    void write(const int64_t (&at)[4], int64_t keys) {
        const ScoreTensor& dbias = problem_.dbias;
        const int64_t rows = axes_[2].elements(at[2]);
        const int64_t start = row_start(dbias, at[0], at[1], at[2] * axes_[2].step, at[3] * axes_[3].step);
        for (int64_t j = 0; j < keys; ++j) {
            A* sums = gradients_.sums() + j * kQueryTileRows;
            if (axes_[2].is_broadcast)
                for (int64_t i = 1; i < kQueryTileRows; ++i) sums[0] += sums[i];
            for (int64_t i = 0; i < rows; ++i)
                store_as(dbias.dtype, dbias.data, start + i * dbias.stride[2] + j * dbias.stride[3], sums[i]);
        }
    }

    const AttentionProblem& problem_;
    const Plan& plan_;
    Gradients& gradients_;
    const DbiasAxis (&axes_)[4];
};

// gradients_of(thread): a DbiasGradients or GradientTangentsOfScores. Writes problem.dbias.
template <class T, class GradientsOf>
static void compute_dbias(const AttentionProblem& problem, const Plan& plan, const GradientsOf& gradients_of) {
    const int64_t extents[4] = {problem.batch, problem.heads_q, problem.q_rows.max_length, problem.k_rows.max_length};
    const int64_t steps[4] = {1, 1, plan.tile_q, plan.tile_k};
    DbiasAxis axes[4];
    int64_t tasks = 1;
    for (int d = 0; d < 4; ++d) {
        axes[d] = {problem.dbias.shape[d] == 1 && extents[d] != 1, problem.dbias.shape[d], steps[d]};
        tasks *= axes[d].tasks();
    }
    run_parallel(tasks, plan.threads, [&](int64_t task, int thread) {
        int64_t at[4];
        for (int d = 3; d >= 0; --d) at[d] = task % axes[d].tasks(), task /= axes[d].tasks();
        auto gradients = gradients_of(thread);
        DbiasTask<T, decltype(gradients)>(problem, plan, gradients, axes).run(at);
    });
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
