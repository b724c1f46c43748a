// The base of the float64 kernels of backward: computes P and dS of a tile of queries and a tile of keys, in shared memory. Two
// warps compute Q K^T, the other two dO V^T; then all threads process the elements, several threads for a query row.
//
// With more than 256 channels the two tensors of the side that a thread block loops over are loaded one after the other into the
// same tile, so that the kernels fit every GPU. All four warps compute each product, each with a part of the channels.
//
//   p = exp(score - lse)      ds = p (keep dp / (1 - p_drop) - delta)
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/attention/query_units.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/shard.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm80/score_f64.cuh"
#include "cuda/tile/double_tile.cuh"

namespace libflash::cuda::sm80 {

// kOfKeys: a thread block has a tile of keys and loops over queries; otherwise the reverse.
template <int kHeadDim, int kTileQ, int kTileK, bool kOfKeys>
struct DoubleGradients {
    static constexpr bool kWide = kHeadDim > 256;
    static constexpr int kThreads = kDoubleThreads, kWarps = kDoubleWarps;
    static constexpr int kLanes = kWide ? kTileK : kThreads / kTileQ;  // threads that share a query row of scores
    static constexpr int kElements = kTileK / kLanes;                  // scores of a thread
    using Queries = DoubleTile<kTileQ, kHeadDim>;
    using Keys = DoubleTile<kTileK, kHeadDim>;
    using Scores = DoubleTile<kTileQ, kTileK>;
    static constexpr int kPartsAt = 2 * (Queries::kBytes + Keys::kBytes + Scores::kBytes) - (kWide ? Keys::kBytes : 0);
    static constexpr int kSeenAt = kPartsAt + (kWide ? (kWarps - 1) * Scores::kBytes : 0);
    static constexpr int kSharedBytes = kSeenAt + (kWide ? kThreads / kLanes : kTileQ > kTileK ? kTileQ : kTileK) * 8;
    static constexpr int kRowHalves = kTileK < 16 ? 2 : 1;  // the two warps of a product share its rows, else its columns
    static_assert(kWide ? kTileQ == 8 && kTileK == 8 : kLanes <= 32 && kElements > 0 && kTileQ / kRowHalves >= 8, "");

    const BackwardParams& params;
    Queries q, dout;
    Keys k, v;
    Scores p, ds;
    int2* seen;  // with kOfKeys the rows [x, y) that see each key, else the keys [x, y) that each query row sees
    int thread, warp, lane;
    // The current tile: work.head is a key head with kOfKeys, else a query head.
    TileCoordinates work;
    SequenceRows q_rows, k_rows;

    __device__ __forceinline__ DoubleGradients(const BackwardParams& given, char* shared) : params(given) {
        constexpr bool kQueriesInTurn = kWide && kOfKeys, kKeysInTurn = kWide && !kOfKeys;
        q.data = reinterpret_cast<double*>(shared);
        dout.data = kQueriesInTurn ? q.data : q.data + Queries::kBytes / 8;
        k.data = dout.data + Queries::kBytes / 8;
        v.data = kKeysInTurn ? k.data : k.data + Keys::kBytes / 8;
        p.data = v.data + Keys::kBytes / 8;
        ds.data = p.data + Scores::kBytes / 8;
        seen = reinterpret_cast<int2*>(shared + kSeenAt);
        thread = threadIdx.x;
        warp = thread / 32;
        lane = thread % 32;
    }

    // Whether this thread has elements of scores. With kWide half of the threads have none.
    __device__ __forceinline__ bool has_elements() const { return thread < kTileQ * kLanes; }

    __device__ __forceinline__ void begin(const TileCoordinates& next) {
        work = next;
        q_rows = SequenceRows::of(params.q_lengths, work.batch);
        k_rows = SequenceRows::of(params.k_lengths, work.batch);
    }
    // Computed at each use, because registers are scarce.
    __device__ __forceinline__ ShardRows shard_rows() const {
        ShardRows all;
        all.init(params.shard, params.mask, q_rows, k_rows, work.batch);
        return all;
    }

    __device__ __forceinline__ void load_queries(int head, int first) const {
        load(q.data, dout.data, params.q, params.dout, q_rows, head, first, Queries{});
    }
    __device__ __forceinline__ void load_keys(int head, int first) const {
        load(k.data, v.data, params.k, params.v, k_rows, head, first, Keys{});
    }
    // With kWide: loads tensor 0 or 1 of the side that the thread block loops over into the tile that both tensors use. Begins
    // with a barrier, after which no warp reads the other tensor, and ends with a barrier.
    __device__ __forceinline__ void load_in_turn(int tensor, int head, int first) const {
        __syncthreads();
        const RowsParams& rows = kOfKeys ? (tensor == 0 ? params.q : params.dout) : (tensor == 0 ? params.k : params.v);
        const SequenceRows& sequence = kOfKeys ? q_rows : k_rows;
        const Queries tile{kOfKeys ? q.data : k.data};
        tile.template load_pairs_async<kThreads>(rows_of(rows, work.batch, head, sequence.start), rows.row, first,
                                                 sequence.length, tensor == 0 ? params.head_dim : params.head_dim_v, thread);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
    }
    // Loads a tile of both tensors of one side.
    template <class Tile>
    __device__ __forceinline__ void load(double* to, double* to_other, const RowsParams& from, const RowsParams& from_other,
                                         const SequenceRows& sequence, int head, int first, Tile tile) const {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const RowsParams& rows = i == 0 ? from : from_other;
            tile.data = i == 0 ? to : to_other;
            tile.template load_pairs_async<kThreads>(rows_of(rows, work.batch, head, sequence.start), rows.row, first,
                                                     sequence.length, i == 0 ? params.head_dim : params.head_dim_v, thread);
        }
        cp_async_commit();
    }

    // With kWide: where a warp stores its part of a tile of scores. The part of the first warp is in `sum`, to which the others
    // are added.
    __device__ __forceinline__ Scores part_of(int of_warp, const Scores& sum) const {
        return {of_warp == 0 ? sum.data : ds.data + of_warp * (Scores::kBytes / 8)};
    }
    // With kWide: ds = dO V^T, then p = Q K^T. Each element is summed by the thread that processes it in differentiate().
    // Afterwards the shared tile holds Q or K. `first`: the first row of the tile of the other side.
    __device__ __forceinline__ void multiply_in_turn(int head, int first) const {
        const unsigned at = hide_from_compiler(lane), g = at / 4, t = at % 4;
#pragma unroll 1
        for (int tensor = 1; tensor >= 0; --tensor) {
            load_in_turn(tensor, head, first);
            const Queries a{tensor == 0 ? q.data : dout.data};
            const Keys b{tensor == 0 ? k.data : v.data};
            const Scores to{tensor == 0 ? p.data : ds.data};
            const int terms = tensor == 0 ? params.head_dim : params.head_dim_v;
            DoubleBlocks<1, 1> c;
            clear(c);
#pragma unroll 1
            for (int term = warp * kTermStep; term < terms; term += kWarps * kTermStep) add_terms(c, a, 0, b, 0, term, g, t);
            const Scores mine = part_of(warp, to);
            mine.at(g, 2 * t) = c[0][0][0];
            mine.at(g, 2 * t + 1) = c[0][0][1];
            __syncthreads();
            if (!has_elements()) continue;
            double& sum = to.at(thread / kLanes, thread % kLanes);
#pragma unroll
            for (int i = 1; i < kWarps; ++i) sum += part_of(i, to).at(thread / kLanes, thread % kLanes);
        }
    }

    // p = Q K^T and ds = dO V^T.
    __device__ __forceinline__ void multiply() const {
        const bool of_scores = warp < 2;
        const int half = warp % 2;
        constexpr int kRowBlocks = kTileQ / 8 / kRowHalves, kColBlocks = kTileK / 8 * kRowHalves / 2;
        const int row = kRowHalves == 2 ? half * kRowBlocks * 8 : 0, col = kRowHalves == 2 ? 0 : half * kColBlocks * 8;
        DoubleBlocks<kRowBlocks, kColBlocks> c;
        clear(c);
        // Copies: a reference to one of two members would put all of them into local memory.
        const Queries a{of_scores ? q.data : dout.data};
        const Keys b{of_scores ? k.data : v.data};
        const Scores to{of_scores ? p.data : ds.data};
        add_scores(c, a, row, b, col, of_scores ? params.head_dim : params.head_dim_v, lane);
#pragma unroll
        for (int i = 0; i < kRowBlocks * kColBlocks * 2; ++i) {
            const int r = i / (kColBlocks * 2), n = i / 2 % kColBlocks, e = i % 2;
            to.at(row + r * 8 + lane / 4, col + n * 8 + lane % 4 * 2 + e) = c[r][n][e];
        }
    }

    __device__ __forceinline__ DoubleStatistics statistics_of(int head, int row) const {
        const int64_t at = QueryUnits::first(params, work.batch, head, q_rows) * kUnitRows + row;
        return reinterpret_cast<const DoubleStatistics*>(params.softmax_statistics)[at];
    }
    __device__ __forceinline__ bool keeps(int head, int row, int key) const {
        if (!params.rare.dropout.active) return true;
        if (params.shard.has_positions) {
            const ShardRows all = shard_rows();
            row = all.rows.at(row), key = all.columns.at(key);
        }
        return dropout_keeps(params.rare.dropout, dropout_head(params.shard, work.batch, head), row, key);
    }

    // Converts the dot products to P, with dropout, and dS: the gradient of the score or, with `before_softcap`, of the scaled
    // dot product before the softcap. first_row, first_key: of the tiles. sees(row, key, col): whether the row, which exists,
    // sees the key; col: number of the key in the tile.
    template <class Sees>
    __device__ __forceinline__ void differentiate(const DoubleScore<BackwardParams>& score, bool before_softcap, int first_row,
                                                  int first_key, const Sees& sees) const {
        if constexpr (kWide) {
            if (!has_elements()) return;
        }
        const int local = thread / kLanes, row = first_row + local, head = score.work.head;
        const bool exists = row < q_rows.length;
        const DoubleStatistics of_row = exists ? statistics_of(head, row) : DoubleStatistics{INFINITY, 0.0};
#pragma unroll 1
        for (int col = thread % kLanes; col < kTileK; col += kLanes) {
            double &x = p.at(local, col), &d = ds.at(local, col);
            const int key = first_key + col;
            if (!exists || !sees(row, key, col) || !score.keeps(row, key)) {
                x = d = 0.0;
                continue;
            }
            double tanh_z;
            const double weight = probability(score.score(x, row, key, &tanh_z), of_row.lse);
            const bool kept = keeps(head, row, key);
            const double gradient = (kept ? d * params.in_double.keep_factor : 0.0) - of_row.delta;
            d = weight * gradient * (before_softcap ? fma(-tanh_z, tanh_z, 1.0) : 1.0);
            x = kept ? weight * params.in_double.keep_factor : 0.0;
        }
    }

    // Writes factor * sums to the rows of a tensor from `first` on or, if params.adds, adds it to them. The sums are staged in
    // `tile`, which no warp may read any more.
    template <int kRowBlocks, int kColBlocks, class Tile>
    __device__ __forceinline__ void store(const DoubleBlocks<kRowBlocks, kColBlocks>& sums, const Tile& tile,
                                          const RowsParams& rows, const SequenceRows& sequence, int first, int channels,
                                          double factor) const {
        stage<kWarps>(sums, tile, warp, lane);
        __syncthreads();
        double* const to = rows_of(rows, work.batch, work.head, sequence.start + first);
        const int existing = sequence.length - first, owned = params.adds ? existing : sequence.owned - first;
        for_elements<kThreads>(tile, owned, channels, thread, [&](double x, int r, int col) {
            double& at = to[r * rows.row + col];
            const double value = r < existing ? x * factor : 0.0;
            at = params.adds ? at + value : value;
        });
    }
};

}  // namespace libflash::cuda::sm80
