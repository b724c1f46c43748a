// dK and dV in float64: a thread block has a tile of keys and loops over the query tiles of all heads that share the keys. The
// sums stay in registers; each warp has all keys of the tile and a part of the channels.
#pragma once

#include "cuda/attention/query_tiles.cuh"
#include "cuda/sm80/gradients_f64.cuh"

namespace libflash::cuda::sm80 {

template <int kHeadDim, int kTileQ, int kTileK>
struct DoubleDkDv : DoubleGradients<kHeadDim, kTileQ, kTileK, true> {
    using Base = DoubleGradients<kHeadDim, kTileQ, kTileK, true>;
    using Base::dout, Base::ds, Base::k_rows, Base::lane, Base::p, Base::params, Base::q, Base::q_rows, Base::seen, Base::thread,
        Base::warp, Base::work;
    using Base::kThreads, Base::kWarps, Base::kWide;
    using Sums = DoubleBlocks<kTileK / 8, double_channel_blocks(kHeadDim)>;

    QueryTiles<kTileQ, kTileK> tiles;
    Sums dk, dv;

    using Base::Base;

    // Returns false if the thread block has no work.
    __device__ __forceinline__ bool prepare() {
        const TileCoordinates next = tile_coordinates<kTileK>(params.key_schedule, params.k_lengths, params.batch);
        if (next.batch < 0) return false;
        this->begin(next);
        if (work.tile * kTileK >= k_rows.owned) return false;
        tiles.init(params, work, q_rows.length, k_rows.length);
        if (thread < kTileK) seen[thread] = this->shard_rows().rows_of(tiles.first_col + thread);
        __syncthreads();
        const int last = min(kTileK, k_rows.length - tiles.first_col) - 1;
        if (params.shard.has_positions && last >= 0) tiles.set_ranges(params, seen[0], seen[last]);
        return true;
    }

    __device__ __forceinline__ void add_tile(const DoubleScore<BackwardParams>& score, int tile) {
        if constexpr (kWide) {
            this->multiply_in_turn(score.work.head, tile * kTileQ);
        } else {
            __syncthreads();  // no warp reads the previous tile
            this->load_queries(score.work.head, tile * kTileQ);
            cp_async_wait<0>();
            __syncthreads();
            this->multiply();
            __syncthreads();
        }
        this->differentiate(score, true, tile * kTileQ, tiles.first_col, [&](int row, int, int col) {
            const int2 rows = seen[col];
            return row >= rows.x && row < rows.y;
        });
        __syncthreads();
        if constexpr (kWide) {
            add_values<true, kTileQ, kWarps>(dk, ds, q, params.head_dim, warp, lane);
            this->load_in_turn(1, score.work.head, tile * kTileQ);
            add_values<true, kTileQ, kWarps>(dv, p, dout, params.head_dim_v, warp, lane);
        } else {
            add_values<true, kTileQ, kWarps>(dv, p, dout, params.head_dim_v, warp, lane);
            add_values<true, kTileQ, kWarps>(dk, ds, q, params.head_dim, warp, lane);
        }
    }

    __device__ __forceinline__ void run() {
        if (!prepare()) return;
        clear(dk);
        clear(dv);
        this->load_keys(work.head, tiles.first_col);
#pragma unroll 1
        for (int i = 0; i < params.group_size; ++i) {
            const int head = work.head * params.group_size + i;
            const DoubleScore<BackwardParams> score(params, {work.batch, head, 0}, this->shard_rows().alibi_shift);
            int cursor = 0;
#pragma unroll 1
            for (int tile = tiles.begin - 1; (tile = tiles.next(params.block_cols, head, tile, cursor)) >= 0;)
                add_tile(score, tile);
        }
        cp_async_wait<0>();
        __syncthreads();  // no warp reads K and V
        this->store(dv, this->v, params.dv, k_rows, tiles.first_col, params.head_dim_v, 1.0);
        this->store(dk, this->k, params.dk, k_rows, tiles.first_col, params.head_dim, params.in_double.softmax_scale);
    }
};

}  // namespace libflash::cuda::sm80
