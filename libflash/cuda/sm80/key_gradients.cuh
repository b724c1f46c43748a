// Gradients of keys and values, and the sums of the query gradient: backward of FlashAttention-2 (Dao, arXiv 2307.08691, Algorithm 2).
// One thread block makes dk and dv of one tile of keys of one key head; it walks over the query tiles of all query heads that share it.
//
// Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T: a warp has 32 keys, one tile of accumulators for them, and what comes out of
// one product, rounded, is the left operand of the next, dV += P^T dO and dK += dS^T Q, straight from registers. dS goes through shared
// memory, because dQ = dS K sums over the keys of all warps; it is added to sums in the workspace.
//
// Wide heads have too many accumulators for one warp. There kSplit warps share 32 keys: each takes its part of the queries in the first two
// products and its part of the channels in the next two, with P^T and dS^T in shared memory between.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/shared_bytes.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/sm80/query_sums.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace libflash::cuda::sm80 {

template <class T, int kHeadDim, int kBlockM, int kBlockN, int kStages, bool kGeneral>
struct KeyGradients {
    static constexpr int kSplit = backward_split(kHeadDim);
    static constexpr int kKeyWarps = kBlockN / 32;
    static constexpr int kWarps = kKeyWarps * kSplit;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kQueries = kBlockM / kSplit;  // of a tile, whose scores a warp computes: so many at a time:
    static constexpr int kChunk = kQueries < (kGeneral ? 16 : 32) ? kQueries : (kGeneral ? 16 : 32);
    static constexpr int kChannels = kHeadDim / kSplit;  // of dk and dv, that a warp accumulates
    static constexpr int kBuffers = backward_buffers(kStages);
    static constexpr bool kOneBarrier = kBuffers == 2;

    using KvTile = SharedTile<kBlockN, kHeadDim>;
    using QTile = SharedTile<kBlockM, kHeadDim>;
    using ScoreTile = SharedTile<kBlockN, kBlockM>;  // transposed: a row for each key
    using Sums = QuerySums<T, kHeadDim, kBlockM, kWarps>;

    // Shared memory: K, V, the stages (Q, dO, facts), the buffers (dS, and P if it is shared), Common.
    static constexpr int kFactBytes = kBlockM * sizeof(RowFacts);
    static constexpr int kStageBytes = 2 * QTile::kBytes + kFactBytes;
    static constexpr int kBufferBytes = ScoreTile::kBytes * (kSplit > 1 ? 2 : 1);
    static constexpr int kStagesAt = 2 * KvTile::kBytes;
    static constexpr int kBuffersAt = kStagesAt + kStages * kStageBytes;
    static constexpr int kCommonAt = kBuffersAt + kBuffers * kBufferBytes;
    struct Common {
        WorkTile work;  // head: of the key heads
        SequenceRows q_rows, k_rows;
        QueryTiles<kBlockM, kBlockN> tiles;
    };
    static constexpr int kSharedBytes = kCommonAt + kBackwardCommonBytes;
    static_assert(sizeof(Common) <= kBackwardCommonBytes, "");

    // A query tile on the way: of this query head.
    struct Position {
        int head, tile, cursor;  // tile < 0: there is none any more
    };

    const BackwardParams& params;
    char* shared;
    int thread, lane, key_warp, part;

    float dk[2][kChannels / 8][4], dv[2][kChannels / 8][4];

    __device__ __forceinline__ KeyGradients(const BackwardParams& p, char* shared_memory) : params(p), shared(shared_memory) {
        thread = threadIdx.x;
        lane = thread % 32;
        key_warp = thread / 32 / kSplit;
        part = thread / 32 % kSplit;
    }

    __device__ __forceinline__ Common& common() const { return *reinterpret_cast<Common*>(shared + kCommonAt); }
    __device__ __forceinline__ uint32_t smem() const { return shared_address(shared); }
    __device__ __forceinline__ uint32_t k_smem() const { return smem(); }
    __device__ __forceinline__ uint32_t v_smem() const { return smem() + KvTile::kBytes; }
    __device__ __forceinline__ uint32_t q_smem(int stage) const { return smem() + kStagesAt + stage * kStageBytes; }
    __device__ __forceinline__ uint32_t dout_smem(int stage) const { return q_smem(stage) + QTile::kBytes; }
    __device__ __forceinline__ const RowFacts* facts(int stage) const {
        return reinterpret_cast<const RowFacts*>(shared + kStagesAt + stage * kStageBytes + 2 * QTile::kBytes);
    }
    __device__ __forceinline__ uint32_t ds_smem(int buffer) const { return smem() + kBuffersAt + buffer * kBufferBytes; }
    __device__ __forceinline__ uint32_t p_smem(int buffer) const { return ds_smem(buffer) + ScoreTile::kBytes; }

    template <class Element>
    __device__ __forceinline__ Element* start(const RowsParams& rows, int row, int head) const {
        return static_cast<Element*>(rows.data) + common().work.batch * rows.batch + row * rows.row + head * rows.head;
    }

    // False: there is nothing to do. Ends with the thread block in step.
    __device__ __forceinline__ bool prepare() {
        const WorkTile work = work_tile<kBlockN>(params.key_schedule, params.k_lengths, params.batch, params.heads_k);
        if (work.batch < 0) return false;
        const SequenceRows k_rows = SequenceRows::of(params.k_lengths, work.batch);
        if (work.tile * kBlockN >= k_rows.owned) return false;
        if (thread == 0) {
            Common& c = common();
            c.work = work;
            c.k_rows = k_rows;
            c.q_rows = SequenceRows::of(params.q_lengths, work.batch);
            c.tiles.init(params, work, c.q_rows.length, k_rows.length);
        }
        __syncthreads();
        return true;
    }

    template <class Tile>
    __device__ __forceinline__ void load(int offset, const T* rows, int64_t stride, int first_row, int row_limit, int col_limit) {
        if (kGeneral && !params.vector_loads) {
            Tile::template load_slow<kThreads>(shared + offset, rows, stride, first_row, row_limit, col_limit, thread);
        } else {
            Tile::template load_async<kThreads>(smem() + offset, rows, stride, first_row, row_limit, col_limit, thread);
        }
    }
    __device__ __forceinline__ void load_keys() {
        const Common& c = common();
        const int first = c.tiles.first_col, start_row = c.k_rows.start, length = c.k_rows.length;
        load<KvTile>(0, start<const T>(params.k, start_row, c.work.head), params.k.row, first, length, params.head_dim);
        load<KvTile>(KvTile::kBytes, start<const T>(params.v, start_row, c.work.head), params.v.row, first, length, params.head_dim_v);
    }
    // Q, dO and the facts of their rows.
    __device__ __forceinline__ void load_stage(int stage, const Position& at) {
        const Common& c = common();
        const int first = at.tile * kBlockM, start_row = c.q_rows.start, length = c.q_rows.length;
        const int offset = kStagesAt + stage * kStageBytes;
        load<QTile>(offset, start<const T>(params.q, start_row, at.head), params.q.row, first, length, params.head_dim);
        load<QTile>(offset + QTile::kBytes, start<const T>(params.dout, start_row, at.head), params.dout.row, first, length,
                    params.head_dim_v);
        const int64_t row = QueryUnits::first(params, c.work.batch, at.head, start_row) * kUnitRows + first;
        constexpr int kCopies = kFactBytes / 16;
        if (thread < kCopies)
            cp_async_16(smem() + offset + 2 * QTile::kBytes + thread * 16, params.row_facts + row + thread * 2, true);
    }

    __device__ __forceinline__ Position first_position() const {
        Position p{common().work.head * params.group_size, common().tiles.begin - 1, 0};
        advance(p);
        return p;
    }
    __device__ __forceinline__ void advance(Position& p) const {
        const Common& c = common();
        p.tile = c.tiles.next(params.block_cols, p.head, p.tile, p.cursor);
        while (p.tile < 0 && p.head + 1 < (c.work.head + 1) * params.group_size) {
            p.cursor = 0;
            p.tile = c.tiles.next(params.block_cols, ++p.head, c.tiles.begin - 1, p.cursor);
        }
    }

    // Masks by position: scores of keys [32 * key_warp, + 32) and queries [first, first + kChunk) of the tile.
    __device__ __forceinline__ void mask_edge(float (&s)[2][kChunk / 8][4], int tile, int first) const {
        const auto& tiles = common().tiles;
        const int first_row = tile * kBlockM + first + lane % 4 * 2;
#pragma unroll
        for (int a = 0; a < 2; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                // Rows of this lane, counted from its first one, that see the key: [begin, end).
                const int key = tiles.first_col + key_warp * 32 + a * 16 + r * 8 + lane / 4;
                const int begin = key - tiles.shift - tiles.right - first_row;
                const int end = key < tiles.length_k ? min(tiles.length_q, key - tiles.shift + tiles.left + 1) - first_row : -1;
#pragma unroll
                for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int row = n * 8 + e;
                        if (row < begin || row >= end) s[a][n][2 * r + e] = -INFINITY;
                    }
            }
    }

    // c = (32 rows of a K-like tile) (kChunk rows of a Q-like tile)^T.
    __device__ __forceinline__ void multiply_scores(float (&c)[2][kChunk / 8][4], uint32_t keys, uint32_t queries, int first) {
        const int at = opaque(lane);
        const auto a_address = KvTile::a_address(keys, key_warp * 32, at);
        const auto b_address = QTile::b_address(queries + first * QTile::kRowBytes, at);
        clear(c);
        add_product<T, kHeadDim / 16>(
            c,
            [&](int step, uint32_t(&f)[2][4]) {
                ldmatrix_x4(f[0], a_address.at(0, step));
                ldmatrix_x4(f[1], a_address.at(16, step));
            },
            [&](int step, int pair, uint32_t(&f)[4]) { ldmatrix_x4(f, b_address.at(pair * 16, step)); });
    }

    using Fragments = uint32_t[kChunk / 16][2][4];

    // Writes rounded scores of the warp's keys and queries [first, first + kChunk) to a transposed score tile.
    __device__ __forceinline__ void share(uint32_t tile, const Fragments& f, int first) const {
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)
#pragma unroll
            for (int a = 0; a < 2; ++a)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = key_warp * 32 + a * 16 + (i & 1) * 8 + lane / 4;
                    store_shared(tile + ScoreTile::offset(row, first / 8 + step * 2 + i / 2) + lane % 4 * 4, f[step][a][i]);
                }
    }

    // The scores of a chunk of queries: P^T and dS^T, rounded.
    __device__ __forceinline__ void gradients_of_scores(Fragments& p_out, Fragments& ds_out, int stage, const Position& at, int first,
                                                        bool edge) {
        float s[2][kChunk / 8][4], dp[2][kChunk / 8][4];
        const float4* row_facts = reinterpret_cast<const float4*>(facts(stage) + first + lane % 4 * 2);
        multiply_scores(s, k_smem(), q_smem(stage), first);
        if (edge) mask_edge(s, at.tile, first);
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n) {
            const float4 f = row_facts[n * 4];  // facts of this lane's two rows
#pragma unroll
            for (int a = 0; a < 2; ++a)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    s[a][n][e] = exp2_approx(min_or_nan(fmaf(s[a][n][e], params.scale_log2, e & 1 ? -f.z : -f.x), 0.0f));
        }
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)
#pragma unroll
            for (int a = 0; a < 2; ++a) to_fragment<T>(p_out[step][a], s[a][2 * step], s[a][2 * step + 1]);
        multiply_scores(dp, v_smem(), dout_smem(stage), first);
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n) {
            const float4 f = row_facts[n * 4];
#pragma unroll
            for (int a = 0; a < 2; ++a)
#pragma unroll
                for (int e = 0; e < 4; ++e) dp[a][n][e] = s[a][n][e] * (dp[a][n][e] - (e & 1 ? f.w : f.y));
        }
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)
#pragma unroll
            for (int a = 0; a < 2; ++a) to_fragment<T>(ds_out[step][a], dp[a][2 * step], dp[a][2 * step + 1]);
    }

    // sums += (the warp's fragments: 32 keys, kChunk queries) (the queries' rows of a Q-like tile): not split, all channels.
    __device__ __forceinline__ void add_from_registers(float (&sums)[2][kChannels / 8][4], const Fragments& f, uint32_t rows, int first) {
        const auto b_address = QTile::b_trans_address(rows + first * QTile::kRowBytes, opaque(lane));
        add_product<T, kChunk / 16>(
            sums,
            [&](int step, uint32_t(&a)[2][4]) {
#pragma unroll
                for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = f[step][i / 4][i % 4];
            },
            [&](int step, int pair, uint32_t(&b)[4]) { ldmatrix_x4_trans(b, b_address.at(step * 16, pair)); });
    }

    // The same from a transposed score tile, with all queries of the tile and this warp's channels.
    __device__ __forceinline__ void add_from_shared(float (&sums)[2][kChannels / 8][4], uint32_t scores, uint32_t rows) {
        const int at = opaque(lane);
        const auto a_address = ScoreTile::a_address(scores, key_warp * 32, at);
        const ChannelAddress b_address(QTile::b_trans_address(rows, at), part);
        add_product<T, kBlockM / 16>(
            sums,
            [&](int step, uint32_t(&a)[2][4]) {
                ldmatrix_x4(a[0], a_address.at(0, step));
                ldmatrix_x4(a[1], a_address.at(16, step));
            },
            [&](int step, int pair, uint32_t(&b)[4]) { ldmatrix_x4_trans(b, b_address.at(step * 16, pair)); });
    }
    using ChannelAddress = ColumnAddress<QTile, kChannels / 16>;

    __device__ __forceinline__ void scores(int stage, int buffer, const Position& at) {
        const bool edge = common().tiles.is_edge(at.tile);
#pragma unroll 1
        for (int first = part * kQueries; first < (part + 1) * kQueries; first += kChunk) {
            Fragments p, ds;
            gradients_of_scores(p, ds, stage, at, first, edge);
            share(ds_smem(buffer), ds, first);
            if constexpr (kSplit == 1) {
                add_from_registers(dv, p, dout_smem(stage), first);
                add_from_registers(dk, ds, q_smem(stage), first);
            } else {
                share(p_smem(buffer), p, first);
            }
        }
    }

    __device__ __forceinline__ void products(int stage, int buffer, const Position& at) {
        if constexpr (kSplit > 1) {
            add_from_shared(dv, p_smem(buffer), dout_smem(stage));
            add_from_shared(dk, ds_smem(buffer), q_smem(stage));
        }
        if (params.dq_sums) {
            float dq[Sums::kSlabs][Sums::kBlocks][4];
            Sums::template multiply<kBlockN>(dq, ds_smem(buffer), k_smem(), thread / 32, opaque(lane));
            const int64_t unit = QueryUnits::first(params, common().work.batch, at.head, common().q_rows.start);
            Sums::add(params.dq_sums + Sums::tile_offset(unit, at.tile), dq, thread / 32, lane);
        }
    }

    __device__ __forceinline__ void walk_queries() {
        clear(dk);
        clear(dv);
        Position current = first_position(), ahead = current;
        load_keys();
#pragma unroll
        for (int s = 0; s + 1 < kStages; ++s) {
            if (ahead.tile >= 0) {
                load_stage(s, ahead);
                advance(ahead);
            }
            cp_async_commit();
        }
        if constexpr (kOneBarrier) {
            cp_async_wait<kStages - 2>();
            __syncthreads();
        }
        int stage = 0, buffer = 0;
#pragma unroll 1
        while (current.tile >= 0) {
            const int last = stage == 0 ? kStages - 1 : stage - 1;  // the stage that was used before this one
            if constexpr (kOneBarrier) {
                scores(stage, buffer, current);
                cp_async_wait<0>();
                __syncthreads();  // dS is complete; the next stage has arrived; nobody reads the stage and the buffer before this one
                load_ahead(last, ahead);
                products(stage, buffer, current);
                buffer ^= 1;
            } else {
                if constexpr (kStages == 1) load_ahead(0, ahead);
                cp_async_wait<kStages == 1 ? 0 : kStages - 2>();
                __syncthreads();  // the stage has arrived; nobody reads dS and the stage before this one
                if constexpr (kStages > 1) load_ahead(last, ahead);
                scores(stage, 0, current);
                __syncthreads();  // dS is complete
                products(stage, 0, current);
                if constexpr (kStages == 1) __syncthreads();  // nobody reads the stage
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

    // Through the tiles of K and V, which nobody reads any more, so that the stores are whole rows.
    __device__ __forceinline__ void store(const float (&sums)[2][kChannels / 8][4], int offset, const RowsParams& rows, float factor,
                                          int channels) {
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
        KvTile::template store<kThreads>(shared + offset, start<T>(rows, c.k_rows.start, c.work.head), rows.row, c.tiles.first_col,
                                         c.k_rows.owned, channels, params.vector_out, thread);
    }

    __device__ __forceinline__ void run() {
        if (!prepare()) return;
        walk_queries();
        store(dv, KvTile::kBytes, params.dv, kGeneral ? params.rare.dropout.keep_factor : 1.0f, params.head_dim_v);
        store(dk, 0, params.dk, params.softmax_scale, params.head_dim);
    }
};

}  // namespace libflash::cuda::sm80
