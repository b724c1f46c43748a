// Base class of sm80/dq.cuh and dbias.cuh: recomputes scores and dS for a tile of query rows, so that sums over keys or heads
// have a fixed order. Each warp has kSlabs * 16 query rows and processes kChunk keys at a time in registers.
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/query_rows_tiles.h"
#include "cuda/attention/query_units.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/shard.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/split_product.cuh"
#include "cuda/tile/store_floats.cuh"

#include <type_traits>

namespace libflash::cuda {

template <class T, int kHeadDim, bool kGeneral>
struct QueryRows {
    static constexpr bool kFloat = std::is_same<T, float>::value;
    static constexpr int kBlockM = query_rows_tile_q(kHeadDim, kGeneral, sizeof(T));
    static constexpr int kBlockN = query_rows_tile_k(kHeadDim, sizeof(T));
    static constexpr int kWarps = kFloat || kHeadDim > 256 ? kBlockM / 16 : 4, kThreads = kWarps * 32;
    static constexpr int kSlabs = kBlockM / kWarps / 16;
    // kChunk: keys at a time. For GPUs before sm_90 the compiler needs more registers for wide heads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    static constexpr int kChunk = kGeneral || kFloat ? 16 : 32;
#else
    static constexpr int kChunk = kGeneral || kFloat || kHeadDim > 96 ? 16 : 32;
#endif
    static constexpr int kBlocks = kChunk / 8;
    static constexpr int kAhead = 1;
    using QTile = SharedTile<kBlockM, kHeadDim, sizeof(T)>;
    using KvTile = SharedTile<kBlockN, kHeadDim, sizeof(T)>;
    using Tiles = KeyTiles<kBlockM, kBlockN>;
    using Scores = float[kSlabs][kBlocks][4];
    using Fragments = uint32_t[kChunk / 16][kSlabs][4];

    // Shared memory: Q, dO, K, V, softmax statistics of the rows.
    static constexpr int kKeysAt = 2 * QTile::kBytes;
    static constexpr int kStatisticsAt = kKeysAt + 2 * KvTile::kBytes;
    using Shard = ShardTile<kBlockM>;  // of the general instance
    static constexpr int kShardAt = kStatisticsAt + kBlockM * static_cast<int>(sizeof(SoftmaxStatistics));
    static constexpr int kSharedBytes = kShardAt + (kGeneral ? static_cast<int>(sizeof(Shard) + 15) / 16 * 16 : 0);

    const BackwardParams& params;
    char* shared;
    int thread, warp, lane;
    // The current work tile: sequence, head, query tile.
    TileCoordinates work;
    SequenceRows q_rows, k_rows;
    Tiles tiles;

    __device__ __forceinline__ QueryRows(const BackwardParams& p, char* shared_memory) : params(p), shared(shared_memory) {
        thread = threadIdx.x;
        warp = thread / 32;
        lane = thread % 32;
    }

    __device__ __forceinline__ uint32_t smem() const { return shared_address(shared); }

    __device__ __forceinline__ void begin(const TileCoordinates& next) {
        work = next;
        q_rows = SequenceRows::of(params.q_lengths, work.batch);
        k_rows = SequenceRows::of(params.k_lengths, work.batch);
        tiles.init(params.mask, params.block_rows, work, q_rows, k_rows);
        if constexpr (kGeneral) begin_shard();
    }
    // With positions, the range of key tiles is computed from the keys that the first and the last row see. All threads compute
    // the same range.
    __device__ __forceinline__ void begin_shard() {
        if (!params.shard.has_positions) return;
        const int last = min(tiles.first_row + kBlockM, q_rows.length) - 1;
        if (last < tiles.first_row) return;
        const ShardRows all = shard_rows();
        tiles.set_ranges(all.keys_of(tiles.first_row), all.keys_of(last));
        tiles.set_blocks(params.block_rows, work);
    }
    __device__ __forceinline__ ShardRows shard_rows() const {
        ShardRows all;
        all.init(params.shard, params.mask, q_rows, k_rows, work.batch);
        return all;
    }
    __device__ __forceinline__ Shard& shard() const { return *reinterpret_cast<Shard*>(shared + kShardAt); }

    template <class Tile>
    __device__ __forceinline__ void load(int offset, const RowsParams& rows, int head, const SequenceRows& sequence, int first,
                                         int channels) {
        const T* matrix =
            static_cast<const T*>(rows.data) + work.batch * rows.batch + sequence.start * rows.row + int64_t{head} * rows.head;
        if (kGeneral && !params.vector_loads) {
            Tile::template load_slow<kThreads>(shared + offset, matrix, rows.row, first, sequence.length, channels, thread);
        } else {
            Tile::template load_async<kThreads>(smem() + offset, matrix, rows.row, first, sequence.length, channels, thread);
        }
    }
    __device__ __forceinline__ void load_rows() {
        load<QTile>(0, params.q, work.head, q_rows, tiles.first_row, params.head_dim);
        load<QTile>(QTile::kBytes, params.dout, work.head, q_rows, tiles.first_row, params.head_dim_v);
        const int64_t row = QueryUnits::first(params, work.batch, work.head, q_rows) * kUnitRows + tiles.first_row;
        constexpr int kCopies = kBlockM * sizeof(SoftmaxStatistics) / 16;
        if (thread < kCopies)
            cp_async_16(smem() + kStatisticsAt + thread * 16, params.softmax_statistics + row + thread * 2, true);
        cp_async_commit();
        if constexpr (kGeneral) {
            const ShardRows all = shard_rows();
            for (int i = thread; i < kBlockM; i += kThreads) shard().seen[i] = all.keys_of(tiles.first_row + i);
            if (thread == 0) shard().set(all, params.shard, work);
        }
    }
    __device__ __forceinline__ void load_keys(int tile) {
        const int head = work.head / params.group_size;
        load<KvTile>(kKeysAt, params.k, head, k_rows, tile * kBlockN, params.head_dim);
        load<KvTile>(kKeysAt + KvTile::kBytes, params.v, head, k_rows, tile * kBlockN, params.head_dim_v);
        cp_async_commit();
    }

    // s = A B^T over `channels`. A: the warp's rows of the Q or dO tile at rows_at. B: kChunk rows, from `first` on, of the K or
    // V tile at keys_at.
    __device__ __forceinline__ void multiply(Scores& s, int rows_at, int keys_at, int first, int channels) const {
        const int at = hide_from_compiler(lane);
        const auto a_address = QTile::a_address(smem() + rows_at, warp * kSlabs * 16, at);
        const auto b_address = KvTile::b_address(smem() + keys_at + first * KvTile::kRowBytes, at);
        const auto load_a = [=](int step, uint32_t (&f)[kSlabs][4]) {
#pragma unroll
            for (int a = 0; a < kSlabs; ++a) ldmatrix_x4(f[a], a_address.at(a * 16, step));
        };
        const auto load_b = [=](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4(f, b_address.at(pair * 16, step)); };
        if constexpr (kFloat) {
            split_product<true, kHeadDim / 8>(s, channels, load_a, load_b);
        } else {
            auto product = make_product<T, kHeadDim / 16, kAhead, kSlabs, kBlocks>(load_a, load_b);
            clear(s);
            product.start();
            product.add_to(s, [](int) {});
        }
    }

    // Row and key of element e of block n of slab a.
    __device__ __forceinline__ int row_of(int a, int e) const {
        return tiles.first_row + (warp * kSlabs + a) * 16 + (e >> 1) * 8 + lane / 4;
    }
    __device__ __forceinline__ int col_of(int tile, int first, int n, int e) const {
        return tile * kBlockN + first + n * 8 + lane % 4 * 2 + (e & 1);
    }
    __device__ __forceinline__ SoftmaxStatistics statistics_of(int a, int e) const {
        return reinterpret_cast<const SoftmaxStatistics*>(shared +
                                                          kStatisticsAt)[(warp * kSlabs + a) * 16 + (e >> 1) * 8 + lane / 4];
    }

    // Calls rule(element, row, col) for each score.
    template <class Rule>
    __device__ __forceinline__ void for_all(Scores& s, int tile, int first, const Rule& rule) const {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int n = 0; n < kBlocks; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) rule(s[a][n][e], row_of(a, e), col_of(tile, first, n, e));
    }

    // dS times 2^exponent_shift() for the warp's rows and keys [first, first + kChunk) of the tile in shared memory: the gradient
    // of the score or, with kBeforeSoftcap, the gradient of the scaled dot product before the softcap.
    template <bool kBeforeSoftcap>
    __device__ __forceinline__ void gradients(Scores& ds, int tile, int first) const {
        Scores s;
        if constexpr (kGeneral) {
            multiply(ds, QTile::kBytes, kKeysAt + KvTile::kBytes, first, params.head_dim_v);
            if (params.rare.dropout.active) drop(ds, tile, first);
            multiply(s, 0, kKeysAt, first, params.head_dim);
            apply_rules<kBeforeSoftcap>(s, ds, tile, first);
        } else {
            multiply(s, 0, kKeysAt, first, params.head_dim);
            mask_edge(s, tile, first);
            exponentiate(s);
            multiply(ds, QTile::kBytes, kKeysAt + KvTile::kBytes, first, params.head_dim_v);
            for_each_row([&](int a, int e, const SoftmaxStatistics& statistics) {
#pragma unroll
                for (int n = 0; n < kBlocks; ++n) ds[a][n][e] = s[a][n][e] * (ds[a][n][e] - statistics.delta);
            });
        }
    }

    template <class Rule>
    __device__ __forceinline__ void for_each_row(const Rule& rule) const {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int e = 0; e < 4; ++e) rule(a, e, statistics_of(a, e));
    }

    // Applies the causal mask, the window and the length.
    __device__ __forceinline__ void mask_edge(Scores& s, int tile, int first) const {
        if (!tiles.is_edge(tile)) return;
        const auto all = [&](const auto& rule) { for_all(s, tile, first, rule); };
        if constexpr (kGeneral) {
            all([&](float& score, int row, int col) {
                const int2 keys = shard().seen[row - tiles.first_row];
                if (col < keys.x || col >= keys.y) score = -INFINITY;
            });
        } else {
            mask_edge_by_element(tiles, all);
        }
    }

    // Computes probabilities from scores in base-2 units (kGeneral) or from dot products.
    __device__ __forceinline__ void exponentiate(Scores& s) const {
        for_each_row([&](int a, int e, const SoftmaxStatistics& statistics) {
#pragma unroll
            for (int n = 0; n < kBlocks; ++n) {
                float& x = s[a][n][e];
                x = kGeneral ? min_or_nan(x - statistics.lse_log2, exponent_shift<T>())
                             : fmaf(x, params.scale_log2, -statistics.lse_log2);
                x = exp2_approx(x);
            }
        });
    }

    // Turns the dot products s and dp (in ds) into p and dS. Each step updates ds as soon as its factor is known, so that no
    // other values need registers.
    template <bool kBeforeSoftcap>
    __device__ __forceinline__ void apply_rules(Scores& s, Scores& ds, int tile, int first) const {
        const RareParams& rare = params.rare;
        const int rows = q_rows.length, cols = tiles.length_k;
        const auto all = [&](const auto& rule) { for_all(s, tile, first, rule); };
        const auto each = [&](const auto& rule) {
            for_all(s, tile, first, [&](float& x, int row, int col) {
                if (row < rows && col < cols) rule(x, row, col);
            });
        };
        scale_and_cap(rare, params.softmax_scale, all);
        const float inverse = kBeforeSoftcap && rare.softcap > 0.0f ? 1.0f / rare.softcap : 0.0f;
        for_each_row([&](int a, int e, const SoftmaxStatistics& statistics) {
#pragma unroll
            for (int n = 0; n < kBlocks; ++n) {
                const float capped = s[a][n][e] * inverse;
                ds[a][n][e] = (ds[a][n][e] - statistics.delta) * fmaf(-capped, capped, 1.0f);
            }
        });
        ScoreRules<T> rules;
        rules.init(rare, work.batch, work.head, shard().all.alibi_shift);
        add_and_hide<T>(rare, rules, all, each);
        mask_edge(s, tile, first);
        exponentiate(s);
#pragma unroll
        for (int i = 0; i < kSlabs * kBlocks * 4; ++i)
            ds[i / (kBlocks * 4)][i / 4 % kBlocks][i % 4] *= s[i / (kBlocks * 4)][i / 4 % kBlocks][i % 4];
    }

    __device__ __forceinline__ void drop(Scores& dp, int tile, int first) const {
        const DropoutParams& dropout = params.rare.dropout;
        static_assert(!kGeneral || (kSlabs == 1 && kBlocks == 2), "one bit for each of 8 elements");
        // In the order of the elements of dp.
        const Shard& of = shard();
        const auto row = [&](int r) { return row_of(0, 2 * r); };
        uint32_t keep;
        if (of.all.has_positions) {
            keep = keep_bits_of_elements<8>(
                dropout, of.batch_head, [&](int i) { return of.all.rows.at(row(i >> 1 & 1)); },
                [&](int i) { return of.all.columns.at(col_of(tile, first, i / 4, i & 1)); });
        } else {
            keep = keep_bits<2, 2, 4>(dropout, of.batch_head, tile * kBlockN + first, lane, row);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& x = dp[0][i / 4][i % 4];
            x = keep >> i & 1 ? x * dropout.keep_factor : 0.0f;
        }
    }
};

}  // namespace libflash::cuda
