// Main backward kernel: dK, dV and the dQ accumulator (FlashAttention-2, Dao, arXiv 2307.08691, Algorithm 2). A thread block
// computes dK and dV of one key tile of one key head; it loops over the query tiles of all query heads that share the key head.
//
// Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, 32 keys per warp. The rounded accumulators of these products are
// then left operands of dV += P^T dO and dK += dS^T Q without leaving registers. dS goes through shared memory, because dQ = dS K
// sums over the keys of all warps; the result is added to the dQ accumulator.
//
// With wide heads dK and dV do not fit into the registers of one warp. Then kSplit warps share 32 keys: each takes a part of the
// queries in the first two products and a part of the channels in the next two. P^T and dS^T go through shared memory.
#pragma once

#include "cuda/attention/dq_accumulator.cuh"
#include "cuda/attention/gradient_sums.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/attention/query_units.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/shard.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/sm80/backward_tiles.h"
#include "cuda/sm80/score_chunk.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/store_floats.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

template <class T, int kHeadDim, int kBlockM, int kBlockN, int kStages, bool kGeneral>
struct DkDv {
    static constexpr int kSplit = backward_split(kHeadDim);
    static constexpr int kKeyWarps = kBlockN / 32;
    static constexpr int kWarps = kKeyWarps * kSplit;
    static constexpr int kThreads = kWarps * 32;
    // Queries of a tile whose scores a warp computes, kChunk at a time. With small tiles some warps have none.
    static constexpr int kQueries = kBlockM / kSplit < 16 ? 16 : kBlockM / kSplit;
    static constexpr bool kFloat = std::is_same<T, float>::value;
    static constexpr int kMostAtOnce = kGeneral || kFloat ? 16 : 32;
    static constexpr int kChunk = kQueries < kMostAtOnce ? kQueries : kMostAtOnce;
    static constexpr int kChannels = kHeadDim / kSplit;  // channels of dK and dV per warp
    static constexpr int kBuffers = backward_buffers(kStages);
    // Fragments loaded ahead. With rare options and on older architectures registers suffice for one only.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    static constexpr int kAhead = 1;
#else
    static constexpr int kAhead = kGeneral ? 1 : 2;
#endif
    static constexpr bool kOneBarrier = kBuffers == 2;

    using KvTile = SharedTile<kBlockN, kHeadDim, sizeof(T)>;
    using QTile = SharedTile<kBlockM, kHeadDim, sizeof(T)>;
    using ScoreTile = SharedTile<kBlockN, kBlockM, sizeof(T)>;  // transposed: one row per key
    using Accumulator = DqAccumulator<T, kHeadDim, kBlockM, kWarps>;
    using Tiles = QueryTiles<kBlockM, kBlockN>;
    using Chunk = ScoreChunk<T, kChunk, Tiles, ShardTile<kBlockN>>;
    using Scores = typename Chunk::Scores;
    using Fragments = typename Chunk::Fragments;

    // Shared memory: K, V, the stages (Q, dO, softmax statistics), the buffers (dS, and with a split P), Common, and in the
    // general instance Shard.
    static constexpr int kStatisticsBytes = kBlockM * sizeof(SoftmaxStatistics);
    static constexpr int kStageBytes = 2 * QTile::kBytes + kStatisticsBytes;
    static constexpr int kBufferBytes = ScoreTile::kBytes * backward_score_tiles(kHeadDim, sizeof(T));
    static constexpr int kStagesAt = 2 * KvTile::kBytes;
    static constexpr int kBuffersAt = kStagesAt + kStages * kStageBytes;
    static constexpr int kCommonAt = kBuffersAt + kBuffers * kBufferBytes;
    struct Common {
        TileCoordinates work;  // work.head is a key head
        SequenceRows q_rows, k_rows;
        Tiles tiles;
        int units_before;  // see QueryUnits
    };
    using Shard = ShardTile<kBlockN>;  // of the general instance
    static constexpr int kShardAt = kCommonAt + kBackwardCommonBytes;
    static constexpr int kSharedBytes = kShardAt + (kGeneral ? static_cast<int>(sizeof(Shard) + 15) / 16 * 16 : 0);
    static_assert(sizeof(Common) <= kBackwardCommonBytes, "");

    // A query tile of a query head in the main loop.
    struct Position {
        int head, tile, cursor;  // tile < 0: no tile is left
    };

    const BackwardParams& params;
    char* shared;
    int thread, lane, key_warp, part;

    float dk[2][kChannels / 8][4], dv[2][kChannels / 8][4];

    __device__ __forceinline__ DkDv(const BackwardParams& p, char* shared_memory) : params(p), shared(shared_memory) {
        thread = threadIdx.x;
        lane = thread % 32;
        key_warp = thread / 32 / kSplit;
        part = thread / 32 % kSplit;
    }

    __device__ __forceinline__ Common& common() const { return *reinterpret_cast<Common*>(shared + kCommonAt); }
    __device__ __forceinline__ Shard& shard() const { return *reinterpret_cast<Shard*>(shared + kShardAt); }
    __device__ __forceinline__ uint32_t smem() const { return shared_address(shared); }
    __device__ __forceinline__ uint32_t k_smem() const { return smem(); }
    __device__ __forceinline__ uint32_t v_smem() const { return smem() + KvTile::kBytes; }
    __device__ __forceinline__ uint32_t q_smem(int stage) const { return smem() + kStagesAt + stage * kStageBytes; }
    __device__ __forceinline__ uint32_t dout_smem(int stage) const { return q_smem(stage) + QTile::kBytes; }
    __device__ __forceinline__ const SoftmaxStatistics* statistics(int stage) const {
        return reinterpret_cast<const SoftmaxStatistics*>(shared + kStagesAt + stage * kStageBytes + 2 * QTile::kBytes);
    }
    __device__ __forceinline__ uint32_t ds_smem(int buffer) const { return smem() + kBuffersAt + buffer * kBufferBytes; }
    __device__ __forceinline__ uint32_t p_smem(int buffer) const { return ds_smem(buffer) + ScoreTile::kBytes; }

    template <class Element>
    __device__ __forceinline__ Element* start(const RowsParams& rows, int row, int head) const {
        return static_cast<Element*>(rows.data) + common().work.batch * rows.batch + row * rows.row + head * rows.head;
    }

    // Returns false if the thread block has no work. Otherwise ends with a barrier.
    __device__ __forceinline__ bool prepare() {
        const int index = params.part.first_work_tile + static_cast<int>(blockIdx.x);
        const TileCoordinates work = tile_coordinates<kBlockN>(params.key_schedule, params.k_lengths, params.batch, index);
        if (work.batch < 0) return false;
        const SequenceRows k_rows = SequenceRows::of(params.k_lengths, work.batch);
        if (work.tile * kBlockN >= k_rows.owned) return false;
        if (thread == 0) {
            Common& c = common();
            c.work = work;
            c.k_rows = k_rows;
            c.q_rows = SequenceRows::of(params.q_lengths, work.batch);
            c.units_before = QueryUnits::before(params, work.batch, c.q_rows.owned);
            c.tiles.init(params, work, c.q_rows.length, k_rows.length);
        }
        if constexpr (kGeneral) prepare_shard(work, k_rows);
        __syncthreads();
        return true;
    }

    // Stores the range of query rows that see each key of the tile. With positions, the query tiles follow from these ranges.
    __device__ __forceinline__ void prepare_shard(const TileCoordinates& work, const SequenceRows& k_rows) {
        const SequenceRows q_rows = SequenceRows::of(params.q_lengths, work.batch);
        ShardRows all;
        all.init(params.shard, params.mask, q_rows, k_rows, work.batch);
        for (int i = thread; i < kBlockN; i += kThreads) shard().seen[i] = all.rows_of(work.tile * kBlockN + i);
        if (thread == 0) shard().all = all;
        if (!all.has_positions) return;
        __syncthreads();
        const int last = min(kBlockN, k_rows.length - work.tile * kBlockN) - 1;
        if (thread == 0 && last >= 0) common().tiles.set_ranges(params, shard().seen[0], shard().seen[last]);
    }

    template <class Tile>
    __device__ __forceinline__ void load(int offset, const T* rows, int64_t stride, int first_row, int row_limit, int col_limit) {
        // float32 and the general instance have no registers to keep addresses from tile to tile.
        const int me = kFloat || kGeneral ? hide_from_compiler(thread) : thread;
        if (kGeneral && !params.vector_loads) {
            Tile::template load_slow<kThreads>(shared + offset, rows, stride, first_row, row_limit, col_limit, me);
        } else {
            Tile::template load_async<kThreads>(smem() + offset, rows, stride, first_row, row_limit, col_limit, me);
        }
    }
    __device__ __forceinline__ void load_keys() {
        const Common& c = common();
        const int first = c.tiles.first_col, start_row = c.k_rows.start, length = c.k_rows.length;
        load<KvTile>(0, start<const T>(params.k, start_row, c.work.head), params.k.row, first, length, params.head_dim);
        load<KvTile>(KvTile::kBytes, start<const T>(params.v, start_row, c.work.head), params.v.row, first, length,
                     params.head_dim_v);
    }
    // Loads Q, dO and the softmax statistics of their rows.
    __device__ __forceinline__ void load_stage(int stage, const Position& at) {
        const Common& c = common();
        const int first = at.tile * kBlockM, start_row = c.q_rows.start, length = c.q_rows.length;
        const int offset = kStagesAt + stage * kStageBytes;
        load<QTile>(offset, start<const T>(params.q, start_row, at.head), params.q.row, first, length, params.head_dim);
        load<QTile>(offset + QTile::kBytes, start<const T>(params.dout, start_row, at.head), params.dout.row, first, length,
                    params.head_dim_v);
        const int64_t row = QueryUnits::first(params, at.head, c.units_before) * kUnitRows + first;
        constexpr int kCopies = kStatisticsBytes / 16;
        if (thread < kCopies)
            cp_async_16(smem() + offset + 2 * QTile::kBytes + thread * 16, params.softmax_statistics + row + thread * 2, true);
    }

    __device__ __forceinline__ Position first_position() const {
        Position p{common().work.head * params.group_size + params.part.first_head, common().tiles.begin - 1, 0};
        advance(p);
        return p;
    }
    __device__ __forceinline__ void advance(Position& p) const {
        const Common& c = common();
        p.tile = c.tiles.next(params.block_cols, p.head, p.tile, p.cursor);
        const int end_head = c.work.head * params.group_size + params.part.first_head + params.part.heads;
        while (p.tile < 0 && p.head + 1 < end_head) {
            p.cursor = 0;
            p.tile = c.tiles.next(params.block_cols, ++p.head, c.tiles.begin - 1, p.cursor);
        }
    }

    // A B^T. A: the warp's 32 rows of the K or V tile. B: kChunk rows, from `first` on, of the Q or dO tile.
    __device__ __forceinline__ auto score_product(uint32_t keys, uint32_t queries, int first) {
        const int at = hide_from_compiler(lane);
        const auto a_address = KvTile::a_address(keys, key_warp * 32, at);
        const auto b_address = QTile::b_address(queries + first * QTile::kRowBytes, at);
        return make_product<T, kHeadDim / 16, kAhead, 2, kChunk / 8>(
            [=](int step, uint32_t (&f)[2][4]) {
                ldmatrix_x4(f[0], a_address.at(0, step));
                ldmatrix_x4(f[1], a_address.at(16, step));
            },
            [=](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4(f, b_address.at(pair * 16, step)); });
    }

    // Stores rounded P^T or dS^T of the warp's keys and queries [first, first + kChunk) in a transposed score tile.
    __device__ __forceinline__ void store_scores(uint32_t tile, const Fragments& f, int first) const {
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)
#pragma unroll
            for (int a = 0; a < 2; ++a)
                ScoreTile::store_fragment(tile, key_warp * 32 + a * 16, first / 8 + step * 2, lane, f[step][a]);
    }

    using ChannelAddress = ColumnAddress<QTile, kChannels / 16>;

    // A B without a split. A: P^T or dS^T of the warp's 32 keys and kChunk queries, in registers. B: the rows of these queries in
    // the Q or dO tile, all channels.
    __device__ __forceinline__ auto product_from_registers(const Fragments& f, uint32_t rows, int first) {
        const auto b_address = QTile::b_trans_address(rows + first * QTile::kRowBytes, hide_from_compiler(lane));
        return make_product<T, kChunk / 16, kAhead, 2, kChannels / 8>(
            [&f](int step, uint32_t (&a)[2][4]) {
#pragma unroll
                for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = f[step][i / 4][i % 4];
            },
            [=](int step, int pair, uint32_t (&b)[4]) { ldmatrix_x4_trans(b, b_address.at(step * 16, pair)); });
    }

    // A B with a split. A: P^T or dS^T of the warp's 32 keys and all queries of the tile, from a transposed score tile. B: this
    // warp's channels of the Q or dO tile.
    __device__ __forceinline__ auto product_from_shared(uint32_t scores, uint32_t rows) {
        const int at = hide_from_compiler(lane);
        const auto a_address = ScoreTile::a_address(scores, key_warp * 32, at);
        const ChannelAddress b_address(QTile::b_trans_address(rows, at), part);
        return make_product<T, kBlockM / 16, kAhead, 2, kChannels / 8>(
            [=](int step, uint32_t (&a)[2][4]) {
                ldmatrix_x4(a[0], a_address.at(0, step));
                ldmatrix_x4(a[1], a_address.at(16, step));
            },
            [=](int step, int pair, uint32_t (&b)[4]) { ldmatrix_x4_trans(b, b_address.at(step * 16, pair)); });
    }

    // Computes P^T and dS^T of queries [first, first + kChunk) of the tile, and stores dS^T in shared memory. Without a split it
    // also adds their products to dV and dK; with a split it stores P^T, too, and products() multiplies both.
    __device__ __forceinline__ void chunk(int stage, int buffer, const Position& at, int first, bool edge) {
        constexpr int kSteps = kHeadDim / 16;
        const Chunk rules(params, common().tiles, at.head, at.tile * kBlockM + first, common().tiles.first_col + key_warp * 32,
                          statistics(stage) + first, shard());
        Scores p, ds;
        Fragments f;
        auto s_product = score_product(k_smem(), q_smem(stage), first);
        auto dp_product = score_product(v_smem(), dout_smem(stage), first);
        clear(p);
        clear(ds);
        if constexpr (kGeneral) {
            dp_product.start();
            dp_product.add_to(ds, [](int) {});
            const uint32_t keep = rules.keep_bits();
            s_product.start();
            s_product.add_to(p, [](int) {});
            rules.apply_rules(p, ds, keep, edge);
        } else {
            s_product.start();
            s_product.add_to(p, [&](int step) {
                if (step == kSteps - 1) dp_product.start();
            });
            if (edge) rules.mask_edge(p);
            dp_product.add_to(ds, [&](int step) { rules.template exponentiate<kSteps>(p, step); });
        }
        Chunk::round(f, p);
        if constexpr (kSplit > 1) {
            store_scores(p_smem(buffer), f, first);
        } else {
            auto dv_product = product_from_registers(f, dout_smem(stage), first);
            dv_product.start();
            dv_product.add_to(dv, [](int) {});
        }
        if constexpr (!kGeneral) rules.template differentiate<1>(ds, p, 0);
        Fragments g;
        Chunk::round(g, ds);
        store_scores(ds_smem(buffer), g, first);
        if constexpr (kSplit == 1) {
            auto dk_product = product_from_registers(g, q_smem(stage), first);
            dk_product.start();
            dk_product.add_to(dk, [](int) {});
        }
    }

    __device__ __forceinline__ void scores(int stage, int buffer, const Position& at) {
        const bool edge = common().tiles.is_edge(at.tile);
        if (kSplit * kQueries > kBlockM && part * kQueries >= kBlockM) return;
#pragma unroll 1
        for (int first = part * kQueries; first < (part + 1) * kQueries; first += kChunk) chunk(stage, buffer, at, first, edge);
    }

    __device__ __forceinline__ float* sums_of(const Position& at) const {
        const int64_t unit = QueryUnits::first(params, at.head, common().units_before);
        return params.dq_accumulator + Accumulator::tile_offset(unit, at.tile);
    }

    // The products that need P and dS of all warps. Calls `release` when this warp no longer reads the stage. The additions to
    // the dQ accumulator are spread over the products of dV and dK, or overlap the loads of the next stage: all at once they
    // would delay loads from shared memory. The condition in the loops is the same for all threads; it keeps the compiler from
    // moving the additions together.
    template <class Release>
    __device__ __forceinline__ void products(int stage, int buffer, const Position& at, const Release& release) {
        // The general instance has no registers to keep values that are computed from the warp number.
        const int warp = (kGeneral ? hide_from_compiler(thread) : thread) / 32;
        float dq[Accumulator::kSlabs][Accumulator::kBlocks][4];
        clear(dq);
        auto dq_product =
            Accumulator::template product<kBlockN, kAhead>(ds_smem(buffer), k_smem(), warp, hide_from_compiler(lane));
        if constexpr (kSplit == 1) {
            if (params.dq_accumulator) {
                dq_product.start();
                dq_product.add_to(dq, [](int) {});
            }
            release();
            if (params.dq_accumulator) Accumulator::template add<1>(sums_of(at), dq, warp, lane, 0);
        } else {
            constexpr int kSteps = kBlockM / 16;
            auto dv_product = product_from_shared(p_smem(buffer), dout_smem(stage));
            auto dk_product = product_from_shared(ds_smem(buffer), q_smem(stage));
            dq_product.start();
            dq_product.add_to(dq, [&](int step) {
                if (step == kBlockN / 16 - 1) dv_product.start();
            });
            float* const sums = sums_of(at);
            dv_product.add_to(dv, [&](int step) {
                if (params.dq_accumulator) Accumulator::template add<2 * kSteps>(sums, dq, warp, lane, step);
                if (step == kSteps - 1) dk_product.start();
            });
            dk_product.add_to(dk, [&](int step) {
                if (params.dq_accumulator) Accumulator::template add<2 * kSteps>(sums, dq, warp, lane, kSteps + step);
            });
            release();
        }
    }

    __device__ __forceinline__ void loop_over_queries() {
        clear(dk);
        clear(dv);
        Position current = first_position(), ahead = current;
        load_keys();
        constexpr int kFirst = kStages > 1 ? kStages - 1 : 1;
#pragma unroll
        for (int s = 0; s < kFirst; ++s) load_ahead(s, ahead);
        if constexpr (kOneBarrier) {
            cp_async_wait<kStages - 2>();
            __syncthreads();
        }
        int stage = 0, buffer = 0;
#pragma unroll 1
        while (current.tile >= 0) {
            const int last = stage == 0 ? kStages - 1 : stage - 1;  // the previous stage
            if constexpr (kOneBarrier) {
                scores(stage, buffer, current);
                cp_async_wait<0>();
                __syncthreads();  // dS is complete; the next stage has arrived; no warp reads the previous stage and buffer
                load_ahead(last, ahead);
                products(stage, buffer, current, [] {});
                buffer ^= 1;
            } else {
                cp_async_wait<kStages == 1 ? 0 : kStages - 2>();
                __syncthreads();  // the stage has arrived; no warp reads dS and the previous stage
                if constexpr (kStages > 1) load_ahead(last, ahead);
                scores(stage, 0, current);
                __syncthreads();  // dS is complete
                products(stage, 0, current, [&] {
                    if constexpr (kStages == 1) {
                        __syncthreads();  // no warp reads the stage
                        load_ahead(0, ahead);
                    }
                });
            }
            stage = stage + 1 == kStages ? 0 : stage + 1;
            advance(current);
        }
        cp_async_wait<0>();
        __syncthreads();
    }
    __device__ __forceinline__ void load_ahead(int stage, Position& ahead) {
        if (ahead.tile >= 0) {
            load_stage(stage, ahead);
            advance(ahead);
        }
        cp_async_commit();
    }

    // Adds the sums of earlier launches. Returns false if this launch is not the last one of the key tile
    // (attention/gradient_sums.cuh).
    __device__ __forceinline__ bool add_parts(float (&sums)[2][kChannels / 8][4], int gradient) const {
        constexpr int kBlocks = kChannels / 8;
        const GradientSums<kThreads, 2 * kBlocks> parts(params.part, static_cast<int>(blockIdx.x), gradient,
                                                        hide_from_compiler(static_cast<int>(threadIdx.x)));
        return parts.add_parts([&](int n) -> float* { return sums[n / kBlocks][n % kBlocks]; });
    }

    // Writes a gradient in T. It is staged in shared memory, in the tile of K or V at `offset`, so that the global stores are
    // contiguous.
    __device__ __forceinline__ void store(const float (&sums)[2][kChannels / 8][4], int offset, const RowsParams& rows,
                                          float factor, int channels) {
#pragma unroll
        for (int a = 0; a < 2; ++a)
#pragma unroll
            for (int n = 0; n < kChannels / 8; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = key_warp * 32 + a * 16 + r * 8 + lane / 4;
                    store_shared(smem() + offset + KvTile::offset(row, part * (kChannels / 8) + n) + lane % 4 * 4,
                                 pack_pair(sums[a][n][2 * r] * factor, sums[a][n][2 * r + 1] * factor, T()));
                }
        __syncthreads();
        const Common& c = common();
        KvTile::template store<kThreads>(shared + offset, start<T>(rows, c.k_rows.start, c.work.head), rows.row,
                                         c.tiles.first_col, c.k_rows.owned, channels, params.vector_out, thread);
    }

    // Writes the gradient to a float32 tensor or, if params.adds, adds it to one.
    __device__ __forceinline__ void add_or_store_floats(const float (&sums)[2][kChannels / 8][4], const RowsParams& rows,
                                                        float factor, int channels) {
        const Common& c = common();
        const int first_row = c.tiles.first_col + key_warp * 32 + lane / 4, first_channel = part * kChannels + lane % 4 * 2;
        const int row_limit = params.adds ? c.k_rows.length : c.k_rows.owned;
        float* matrix = start<float>(rows, c.k_rows.start, c.work.head) + first_channel;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = first_row + i * 8;
            store_sums<kChannels / 8>(matrix + row * rows.row, row < row_limit ? channels - first_channel : 0, params.vector_out,
                                      params.adds ? 1.0f : 0.0f,
                                      [&](int n, int e) { return sums[i / 2][n][i % 2 * 2 + e] * factor; });
        }
    }

    // Writes a gradient. `offset`: of the tile of K or V where it may be staged, which no warp reads any more. `wide`: the
    // gradient is float32.
    __device__ __forceinline__ void finish(const float (&sums)[2][kChannels / 8][4], int offset, const RowsParams& rows,
                                           bool wide, float factor, int channels) {
        if (kGeneral && wide) {
            add_or_store_floats(sums, rows, factor, channels);
        } else {
            store(sums, offset, rows, factor, channels);
        }
    }

    __device__ __forceinline__ void run() {
        if (!prepare()) return;
        loop_over_queries();
        if (add_parts(dv, 0))
            finish(dv, KvTile::kBytes, params.dv, params.wide_dv,
                   undo_exponent_shift<T>() * (kGeneral ? params.rare.dropout.keep_factor : 1.0f), params.head_dim_v);
        if (add_parts(dk, 1))
            finish(dk, 0, params.dk, params.wide_dk, undo_exponent_shift<T>() * params.softmax_scale, params.head_dim);
    }
};

}  // namespace libflash::cuda::sm80
