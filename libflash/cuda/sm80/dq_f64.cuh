// dQ and dbias in float64, by tiles of queries: the order of all additions is fixed. Each launch computes one of the two. They
// share a kernel because they differ only in how dS is used.
#pragma once

#include "cuda/attention/bias_tile.cuh"
#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/query_rows_tiles.h"
#include "cuda/sm80/gradients_f64.cuh"

namespace libflash::cuda::sm80 {

template <int kHeadDim>
struct DoubleDq : DoubleGradients<kHeadDim, query_rows_tile_q(kHeadDim, true, sizeof(double)),
                                  query_rows_tile_k(kHeadDim, sizeof(double)), false> {
    static constexpr int kTileQ = query_rows_tile_q(kHeadDim, true, sizeof(double));
    static constexpr int kTileK = query_rows_tile_k(kHeadDim, sizeof(double));
    using Base = DoubleGradients<kHeadDim, kTileQ, kTileK, false>;
    using Base::ds, Base::k, Base::k_rows, Base::lane, Base::params, Base::q_rows, Base::seen, Base::thread, Base::warp,
        Base::work;
    using Base::kElements, Base::kLanes, Base::kThreads, Base::kWarps, Base::kWide;

    KeyTiles<kTileQ, kTileK> tiles;
    int2 keys;  // the keys [x, y) that the query row of this thread sees
    DoubleBlocks<kTileQ / 8, double_channel_blocks(kHeadDim)> dq;
    double sums[kElements];  // dbias: sums of this thread's elements

    using Base::Base;

    __device__ __forceinline__ bool computes_dbias() const { return params.dbias.data; }

    __device__ __forceinline__ void begin_rows(const TileCoordinates& next) {
        this->begin(next);
        tiles.init(params.mask, params.block_rows, work, q_rows, k_rows);
        keys = this->shard_rows().keys_of(tiles.first_row + thread / kLanes);
        if (!params.shard.has_positions) return;
        const int last = min(kTileQ, q_rows.length - tiles.first_row) - 1;
        __syncthreads();  // no thread reads the ranges of the previous rows
        if (thread % kLanes == 0) seen[thread / kLanes] = keys;
        __syncthreads();
        if (last < 0) return;
        tiles.set_ranges(seen[0], seen[last]);
        tiles.set_blocks(params.block_rows, work);
    }

    // Adds those of the key tiles [first, end) that the rows see.
    __device__ __forceinline__ void add_keys(int first, int end) {
        const DoubleScore<BackwardParams> score(params, work, this->shard_rows().alibi_shift);
        const int key_head = work.head / params.group_size;
        bool rows_loaded = false;
        int cursor = tiles.list_count;
#pragma unroll 1
        for (int tile = min(tiles.end, end); (tile = tiles.previous(tile, cursor)) >= first;) {
            __syncthreads();  // no warp reads the previous tiles
            if (!rows_loaded) this->load_queries(work.head, tiles.first_row);
            rows_loaded = true;
            if constexpr (kWide) {
                this->multiply_in_turn(key_head, tile * kTileK);
            } else {
                this->load_keys(key_head, tile * kTileK);
                cp_async_wait<0>();
                __syncthreads();
                this->multiply();
                __syncthreads();
            }
            this->differentiate(score, !computes_dbias(), tiles.first_row, tile * kTileK,
                                [&](int, int key, int) { return key >= keys.x && key < keys.y; });
            __syncthreads();
            if (!computes_dbias()) {
                add_values<false, kTileK, kWarps>(dq, ds, k, params.head_dim, warp, lane);
                continue;
            }
            if constexpr (kWide) {
                if (!this->has_elements()) continue;
            }
#pragma unroll
            for (int i = 0; i < kElements; ++i) sums[i] += ds.at(thread / kLanes, thread % kLanes + i * kLanes);
        }
    }

    // Adds all tiles of scores that contribute to the target: a tile of dQ (its column is 0) or a tile of dbias.
    __device__ __forceinline__ void add_all(const BiasTile& target) {
        const int (&extent)[4] = params.dbias.extent;
        const bool bias = computes_dbias();
        const BiasRange batches(target.batch, bias ? extent[0] : 0, params.batch);
        const BiasRange heads(target.head, bias ? extent[1] : 0, params.heads_q);
#pragma unroll 1
        for (int b = batches.begin; b < batches.end; ++b) {
            const int queries = SequenceRows::of(params.q_lengths, b).length,
                      length = SequenceRows::of(params.k_lengths, b).length;
            const BiasRange rows(target.row, bias ? extent[2] : 0, tile_count(queries, kTileQ));
            const BiasRange cols(target.col, bias ? extent[3] : 1, tile_count(length, kTileK));
#pragma unroll 1
            for (int h = heads.begin; h < heads.end; ++h)
#pragma unroll 1
                for (int r = rows.begin; r < rows.end; ++r) {
                    begin_rows({b, h, r});
                    add_keys(cols.begin, cols.end);
                }
        }
    }

    __device__ __forceinline__ void store_bias(const BiasTile& target) {
        const ScoreGradientParams& out = params.dbias;
        __syncthreads();  // no thread reads the last tile
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            if constexpr (kWide) {
                if (!this->has_elements()) break;
            }
            ds.at(thread / kLanes, thread % kLanes + i * kLanes) = sums[i];
        }
        __syncthreads();
        write_bias_tile<kTileQ, kTileK, kThreads>(
            out, target, thread, [&](int row, int col) { return ds.at(row, col); },
            [&](int64_t at, double sum) { store_number_at(out.data, at, out.is_float, sum); });
    }

    __device__ __forceinline__ void run() {
        BiasTile target = {};
        if (computes_dbias()) {
            target = bias_tile_of<kTileQ, kTileK>(params.dbias, blockIdx.x);
        } else {
            const TileCoordinates next = tile_coordinates<kTileQ>(params.query_tile_schedule, params.q_lengths, params.batch);
            if (next.batch < 0) return;
            target = {next.batch, next.head, next.tile, 0};
            this->begin_rows(next);
            if (tiles.first_row >= q_rows.owned) return;
        }
        clear(dq);
#pragma unroll
        for (int i = 0; i < kElements; ++i) sums[i] = 0.0;
        add_all(target);
        if (computes_dbias()) {
            store_bias(target);
        } else {
            __syncthreads();  // no warp reads Q
            this->store(dq, this->q, params.dq, q_rows, tiles.first_row, params.head_dim, params.in_double.softmax_scale);
        }
    }
};

}  // namespace libflash::cuda::sm80
