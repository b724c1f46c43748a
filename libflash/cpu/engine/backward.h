// The backward pass. A task is a chunk of the keys of one key head. It processes its keys in blocks of key tiles; for each block
// it loops over all query tiles of all query heads of the group. dk and dv are complete at the end of the task. Each chunk has a
// dQ accumulator of its own; these are summed at the end in a fixed order. Chunks depend only on the shape, so the result has
// the same bits with any number of threads.
#pragma once

#include "cpu/engine/backward_rows.h"
#include "cpu/engine/dbias.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kTasksWanted = 16;  // the keys are split into chunks until there are this many tasks
constexpr int64_t kMostChunks = 8;    // each chunk needs a dQ accumulator in the workspace

// Key tiles of a block, which share one packing of each query tile. Their operands and gradients should fit the L2 cache.
FLASH_INLINE int64_t tiles_per_block(const AttentionProblem& problem, const Plan& plan) {
    const int64_t channels = problem.head_dim > problem.head_dim_v ? problem.head_dim : problem.head_dim_v;
    const int64_t most = channels <= 64    ? 4
                         : channels <= 128 ? 2
                                           : 1,
                  tiles = (problem.k_rows.max_length + plan.tile_k - 1) / plan.tile_k;
    return tiles < most ? (tiles > 0 ? tiles : 1) : most;
}

FLASH_INLINE int64_t chunk_keys(const AttentionProblem& problem, const Plan& plan) {
    const int64_t block = tiles_per_block(problem, plan) * plan.tile_k;
    const int64_t blocks = (problem.k_rows.max_length + block - 1) / block;
    const int64_t heads = problem.batch * problem.heads_k;
    int64_t chunks = heads > 0 ? (kTasksWanted + heads - 1) / heads : 1;
    if (chunks > kMostChunks) chunks = kMostChunks;
    const int64_t per_chunk = (blocks + chunks - 1) / chunks;
    return (per_chunk > 0 ? per_chunk : 1) * block;
}

// dk and dv are added to totals after this many query tiles; see blocked_sum.h.
constexpr int64_t kSumBlockTiles = 64;

// The largest number of query tiles that contribute to one key.
FLASH_INLINE int64_t query_tiles_of_group(const AttentionProblem& problem, const Plan& plan) {
    return problem.group_size() * ((problem.q_rows.max_length + plan.tile_q - 1) / plan.tile_q);
}

template <class T>
struct BackwardScratch {
    using A = Acc<T>;
    using E = Element<T>;
    GradientQueryTile<T> query_tile;
    GradientScratch<T> tile;
    E *k = nullptr, *v = nullptr, *k_elements = nullptr;
    A *dk = nullptr, *dv = nullptr, *bias_sums = nullptr;
    // Totals of finished sum blocks; nullptr if one block is enough.
    A *dk_total = nullptr, *dv_total = nullptr;

    BackwardScratch(const AttentionProblem& problem, const Plan& plan, Arena& arena) {
        const HeadDims dims{problem.head_dim, problem.head_dim_v};
        const int64_t tiles = tiles_per_block(problem, plan), keys = tiles * plan.tile_k;
        const int64_t width = round_up(plan.tile_q, kLanes<A>);
        query_tile.lay_out(arena, dims, width);
        tile.lay_out(arena, plan.tile_k, problem.bias.present || problem.mask.present, problem.softcap > 0,
                     problem.dropout.active(), width);
        k = arena.allocate<E>(keys * elements_for<T>(dims.qk));
        v = arena.allocate<E>(keys * elements_for<T>(dims.v));
        if constexpr (kPaired<T>) k_elements = arena.allocate<E>(tiles * elements_for<T>(plan.tile_k) * dims.qk);
        dk = arena.allocate<A>(keys * round_up(dims.qk, kLanes<A>));
        dv = arena.allocate<A>(keys * round_up(dims.v, kLanes<A>));
        if (query_tiles_of_group(problem, plan) > kSumBlockTiles) {
            dk_total = arena.allocate<A>(keys * round_up(dims.qk, kLanes<A>));
            dv_total = arena.allocate<A>(keys * round_up(dims.v, kLanes<A>));
        }
        if (problem.dbias.present) bias_sums = arena.allocate<A>(plan.tile_k * kQueryTileRows);
    }
};

// k_elements of a block: each key tile by itself, so that pairs of keys do not cross tiles.
template <class T>
static void pack_key_elements(const StridedRows<const T>& k, KeyRange keys, int64_t tile_k, int64_t channels, Element<T>* to) {
    for (int64_t first = 0; first < keys.count(); first += tile_k) {
        const int64_t left = keys.count() - first;
        pack_row_elements<T>(k, keys.first + first, left < tile_k ? left : tile_k, channels, channels,
                             to + first / tile_k * elements_for<T>(tile_k) * channels);
    }
}

// The operands of a key tile that begins `offset` keys after its block.
template <class T>
FLASH_INLINE void set_operands(GradientKeyTile<T>& tile, const Operand<Element<T>>& k, const Operand<Element<T>>& v,
                               const Element<T>* k_elements, int64_t offset, int64_t tile_k, int64_t channels) {
    tile.k = {k.data + offset * k.stride, k.stride};
    tile.v = {v.data + offset * v.stride, v.stride};
    tile.k_elements = tile.k;
    if constexpr (kPaired<T>) tile.k_elements = {k_elements + offset / tile_k * elements_for<T>(tile_k) * channels, channels};
}

// What a BackwardTask does with its tiles: it computes the gradients. GradientTangentWork (backward_tangent.h) has the same
// functions and computes their tangents.
template <class T>
class GradientWork {
    using A = Acc<T>;
    using E = Element<T>;

public:
    using Scratch = BackwardScratch<T>;

    GradientWork(const AttentionProblem& problem, const Plan& plan, const BackwardRows<A>& rows, Scratch& scratch, int64_t batch,
                 int64_t key_head)
        : problem_(problem), plan_(plan), rows_(rows), scratch_(scratch), batch_(batch), key_head_(key_head),
          dims_{problem.head_dim, problem.head_dim_v}, first_query_tile_(Tiling(problem.q_rows, plan.tile_q).first_tile(batch)) {}

    Lanes<A>& lanes() { return scratch_.query_tile.lanes; }

    void load_block(KeyRange keys) {
        const auto k = rows_of<const T>(problem_.k, problem_.k_rows, batch_, key_head_);
        const auto v = rows_of<const T>(problem_.v, problem_.k_rows, batch_, key_head_);
        k_ = rows_operand<T>(k, keys.first, keys.count(), dims_.qk, scratch_.k, kPaired<T> ? Reads::once : Reads::often);
        v_ = rows_operand<T>(v, keys.first, keys.count(), dims_.v, scratch_.v, Reads::once);
        if constexpr (kPaired<T>) pack_key_elements<T>(k, keys, plan_.tile_k, dims_.qk, scratch_.k_elements);
    }

    void load_query_tile(int64_t head, int64_t number) {
        GradientQueryTile<T>& query_tile = scratch_.query_tile;
        const auto q = rows_of<const T>(problem_.q, problem_.q_rows, batch_, head);
        const auto dout = rows_of<const T>(problem_.dout, problem_.q_rows, batch_, head);
        const int64_t row0 = query_tile.lanes.row0, at = rows_.at(head, first_query_tile_ + number);
        query_tile.load(StridedRows<const T>{q(row0), q.stride}, StridedRows<const T>{dout(row0), dout.stride}, dims_, true);
        query_tile.lse = rows_.lse + at;
        query_tile.delta = rows_.delta + at;
    }

    // Adds the contributions of the loaded query tile and a key tile. `offset`: of the tile's first key in the block.
    void add(GradientKeyTile<T> tile, int64_t offset, const ScoreRule<A>& rule, const DropoutMask* dropout, A* dq) {
        set_operands_of(tile, offset);
        add_gradients(scratch_.query_tile, tile, dims_, rule, dropout, scratch_.tile, dq);
    }

    void set_operands_of(GradientKeyTile<T>& tile, int64_t offset) const {
        set_operands(tile, k_, v_, scratch_.k_elements, offset, plan_.tile_k, dims_.qk);
    }

private:
    const AttentionProblem& problem_;
    const Plan& plan_;
    const BackwardRows<A>& rows_;
    Scratch& scratch_;
    const int64_t batch_, key_head_;
    const HeadDims dims_;
    const int64_t first_query_tile_;
    Operand<E> k_, v_;
};

template <class T, class Work>
class BackwardTask {
    using A = Acc<T>;

public:
    BackwardTask(const AttentionProblem& problem, const Plan& plan, const BackwardRows<A>& rows, BackwardScratch<T>& scratch,
                 Work& work, int64_t batch, int64_t key_head, int64_t chunk)
        : problem_(problem), plan_(plan), rows_(rows), scratch_(scratch), work_(work), batch_(batch), key_head_(key_head),
          chunk_(chunk), dims_{problem.head_dim, problem.head_dim_v}, length_q_(problem.q_rows.length(batch)),
          dk_(problem.dk, problem.k_rows, batch, key_head), dv_(problem.dv, problem.k_rows, batch, key_head),
          first_query_tile_(Tiling(problem.q_rows, plan.tile_q).first_tile(batch)) {}

    void run(KeyRange keys) {
        const int64_t length = problem_.k_rows.length(batch_), last = keys.last < length ? keys.last : length;
        if (keys.first < last) clear_dq();
        const int64_t block = tiles_per_block(problem_, plan_) * plan_.tile_k;
        for (int64_t first = keys.first; first < last; first += block)
            run_block({first, first + block < last ? first + block : last});
        if (problem_.adds) return;
        for (int64_t row = keys.first > length ? keys.first : length; row < keys.last; ++row) {
            dk_.clear(row, dims_.qk);
            dv_.clear(row, dims_.v);
        }
    }

private:
    int64_t first_head() const { return key_head_ * problem_.group_size(); }
    int64_t last_head() const { return first_head() + problem_.group_size(); }
    int64_t query_tiles() const { return (length_q_ + plan_.tile_q - 1) / plan_.tile_q; }

    void clear_dq() {
        for (int64_t head = first_head(); head < last_head(); ++head)
            std::memset(static_cast<void*>(rows_.dq_at(chunk_, head, first_query_tile_)), 0,
                        static_cast<size_t>(query_tiles() * rows_.channels * rows_.width) * sizeof(A));
    }

    void run_block(KeyRange keys) {
        work_.load_block(keys);
        const int64_t width_k = round_up(dims_.qk, kLanes<A>), width_v = round_up(dims_.v, kLanes<A>);
        clear(scratch_.dk, keys.count() * width_k);
        clear(scratch_.dv, keys.count() * width_v);
        const bool blocked = scratch_.dk_total && problem_.group_size() * query_tiles() > kSumBlockTiles;
        if (blocked) clear(scratch_.dk_total, keys.count() * width_k), clear(scratch_.dv_total, keys.count() * width_v);
        int64_t done = 0;
        for (int64_t head = first_head(); head < last_head(); ++head) {
            const ScoreRule<A> rule = score_rule<A>(problem_, batch_, head);
            for (int64_t query_tile = 0; query_tile < query_tiles(); ++query_tile) {
                run_query_tile(keys, head, rule, query_tile);
                if (blocked && ++done % kSumBlockTiles == 0) add_gradients_to_totals(keys.count());
            }
        }
        if (blocked) {
            add_gradients_to_totals(keys.count());
            std::memcpy(scratch_.dk, scratch_.dk_total, static_cast<size_t>(keys.count() * width_k) * sizeof(A));
            std::memcpy(scratch_.dv, scratch_.dv_total, static_cast<size_t>(keys.count() * width_v) * sizeof(A));
        }
        const A scale = static_cast<A>(problem_.softmax_scale);
        for (int64_t r = 0; r < keys.count(); ++r) {
            store_row(scratch_.dk + r * width_k, dims_.qk, scale, dk_, keys.first + r);
            store_row(scratch_.dv + r * width_v, dims_.v, A(1), dv_, keys.first + r);
        }
    }

    static void clear(A* sums, int64_t count) {
        std::memset(static_cast<void*>(sums), 0, static_cast<size_t>(count) * sizeof(A));
    }

    void add_gradients_to_totals(int64_t keys) {
        add_and_clear(scratch_.dk, scratch_.dk_total, keys * round_up(dims_.qk, kLanes<A>));
        add_and_clear(scratch_.dv, scratch_.dv_total, keys * round_up(dims_.v, kLanes<A>));
    }
    static void add_and_clear(A* from, A* to, int64_t count) {
        for (int64_t n = 0; n < count; n += kLanes<A>) store(to + n, load(to + n) + load(from + n));
        clear(from, count);
    }

    void store_row(const A* sums, int64_t channels, A factor, const ResultRows<T>& to, int64_t row) const {
        for (int64_t c = 0; c < channels; c += kLanes<A>) {
            const Vec<A> gradient = load(sums + c) * factor;
            problem_.adds ? to.add(row, c, gradient, channels - c) : to.store(row, c, gradient, channels - c);
        }
    }

    int64_t tile_count(KeyRange keys, int64_t first) const {
        return keys.last - first < plan_.tile_k ? keys.last - first : int64_t{plan_.tile_k};
    }

    GradientKeyTile<T> tile_at(KeyRange keys, int64_t first) const {
        GradientKeyTile<T> tile;
        tile.first = first, tile.count = tile_count(keys, first);
        tile.dk = scratch_.dk + (first - keys.first) * round_up(dims_.qk, kLanes<A>);
        tile.dv = scratch_.dv + (first - keys.first) * round_up(dims_.v, kLanes<A>);
        return tile;
    }

    void run_query_tile(KeyRange keys, int64_t head, const ScoreRule<A>& rule, int64_t number) {
        cancellation_point();
        Lanes<A>& lanes = work_.lanes();
        const int64_t row0 = number * plan_.tile_q, left = length_q_ - row0;
        set_lanes(lanes, problem_, batch_, head, row0, left < plan_.tile_q ? left : plan_.tile_q);
        const KeyRange visible = lanes.seen_by_any;
        BlockMaskRow blocks(problem_.block_mask, batch_, head, row0 / FLASH_BLOCK_SIZE);
        bool loaded = false;
        for (int64_t first = keys.first; first < keys.last; first += plan_.tile_k) {
            GradientKeyTile<T> tile = tile_at(keys, first);
            if (first >= visible.last || first + tile.count <= visible.first || !blocks.kept(first / FLASH_BLOCK_SIZE)) continue;
            if (visible.last - first < tile.count) tile.count = visible.last - first;
            if (!loaded) work_.load_query_tile(head, number);
            loaded = true;
            const DropoutMask dropout(problem_, batch_, head, SequencePositions(problem_, batch_));
            work_.add(tile, first - keys.first, rule, problem_.dropout.active() ? &dropout : nullptr,
                      rows_.dq_at(chunk_, head, first_query_tile_ + number));
        }
    }

    const AttentionProblem& problem_;
    const Plan& plan_;
    const BackwardRows<A>& rows_;
    BackwardScratch<T>& scratch_;
    Work& work_;
    const int64_t batch_, key_head_, chunk_;
    const HeadDims dims_;
    const int64_t length_q_;
    const ResultRows<T> dk_, dv_;
    const int64_t first_query_tile_;
};

// `Rows` and `Scratch`: of backward or of its tangent. `products`: the amount of work in units of forward.
template <class Rows, class Scratch, class Problem>
static Plan plan_key_tasks(const Problem& problem, double products) {
    Plan plan;
    plan.tile_q = static_cast<int>(tile_size(problem, problem.q_rows, problem.request.tile_q, kQueryTileRows, kQueryTileRows));
    plan.tile_k = static_cast<int>(tile_size(problem, problem.k_rows, problem.request.tile_k, kBackwardKeys, 512));
    const int64_t chunk = chunk_keys(problem, plan);
    plan.key_chunks = problem.k_rows.max_length > chunk ? (problem.k_rows.max_length + chunk - 1) / chunk : 1;
    plan.most_threads = threads_or_default(problem.request.num_threads);
    plan.threads =
        choose_threads(plan.most_threads, plan.key_chunks * problem.batch * problem.heads_k, attention_flops(problem, products));
    Arena shared(nullptr), scratch(nullptr);
    Rows(problem, plan, shared);
    Scratch(problem, plan, scratch);
    plan.workspace_bytes = shared.used() + scratch.used() * static_cast<size_t>(plan.threads);
    return plan;
}

// The scratch memory of one thread, after the `shared` bytes of the workspace.
template <class Scratch, class Problem>
FLASH_INLINE Scratch scratch_of_thread(const Problem& problem, const Plan& plan, void* workspace, size_t shared, int thread) {
    const size_t bytes = (plan.workspace_bytes - shared) / static_cast<size_t>(plan.threads) / 64 * 64;
    Arena arena(static_cast<char*>(workspace) + shared + bytes * static_cast<size_t>(thread));
    return Scratch(problem, plan, arena);
}

// Calls body(batch, key head, chunk, keys, thread) for each task. Early keys first: with a causal mask more rows see them.
template <class Body>
static void run_key_tasks(const AttentionProblem& problem, const Plan& plan, const Body& body) {
    const int64_t heads = problem.batch * problem.heads_k, chunk = chunk_keys(problem, plan);
    run_parallel(plan.key_chunks * heads, plan.threads, [&](int64_t task, int thread) {
        const int64_t batch = task % heads / problem.heads_k, number = task / heads, owned = problem.k_rows.owned(batch);
        const int64_t first = number * chunk,
                      last = number + 1 < plan.key_chunks && first + chunk < owned ? first + chunk : owned;
        if (first < last) body(batch, task % problem.heads_k, number, KeyRange{first, last}, thread);
    });
}

template <class T>
static Plan plan_backward_as(const AttentionProblem& problem) {
    return plan_key_tasks<BackwardRows<Acc<T>>, BackwardScratch<T>>(problem, 2.5);
}

template <class T>
static void backward_as(const AttentionProblem& problem, const Plan& plan, void* workspace) {
    using Scratch = BackwardScratch<T>;
    Arena shared(workspace);
    const BackwardRows<Acc<T>> rows(problem, plan, shared);
    const auto scratch_of = [&](int thread) {
        return scratch_of_thread<Scratch>(problem, plan, workspace, shared.used(), thread);
    };
    prepare_row_statistics<T>(problem, plan, rows);
    run_key_tasks(problem, plan, [&](int64_t batch, int64_t key_head, int64_t chunk, KeyRange keys, int thread) {
        Scratch scratch = scratch_of(thread);
        GradientWork<T> work(problem, plan, rows, scratch, batch, key_head);
        BackwardTask<T, GradientWork<T>>(problem, plan, rows, scratch, work, batch, key_head, chunk).run(keys);
    });
    finish_dq<T>(problem, plan, rows, chunk_keys(problem, plan));
    if (problem.dsink.present) compute_dsink<T>(problem, plan, rows);
    if (problem.dbias.present) {
        compute_dbias<T>(problem, plan,
                         [&](int thread) { return DbiasGradients<T, Scratch>(problem, plan, rows, scratch_of(thread)); });
    }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
