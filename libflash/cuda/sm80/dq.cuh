// Deterministic dq: a thread block loops over all keys of its query tile, so the order of the additions is fixed and there is no
// dQ accumulator. S and dP are recomputed, two more products than with the dQ accumulator.
#pragma once

#include "cuda/attention/query_rows.cuh"

namespace libflash::cuda::sm80 {

template <class T, int kHeadDim, bool kGeneral>
struct Dq : QueryRows<T, kHeadDim, kGeneral> {
    using Base = QueryRows<T, kHeadDim, kGeneral>;
    using Base::kAhead, Base::kBlockM, Base::kBlockN, Base::kChunk, Base::kSlabs, Base::kThreads, Base::kBlocks;
    using Base::kFloat, Base::params, Base::shared, Base::work, Base::q_rows, Base::tiles, Base::lane, Base::warp, Base::thread;
    using typename Base::Fragments, typename Base::KvTile, typename Base::QTile, typename Base::Scores;
    static constexpr int kChannelBlocks = kHeadDim / 8;

    float dq[kSlabs][kChannelBlocks][4];

    using Base::Base;

    __device__ __forceinline__ void add_chunk(int tile, int first) {
        Scores ds;
        this->template gradients<true>(ds, tile, first);
        if constexpr (kFloat) {
            add_split(ds, first);
        } else {
            add_rounded(ds, first);
        }
    }

    // dq += dS K for kChunk keys from `first` on: 3xTF32 for float32, 16-bit products otherwise.
    __device__ __forceinline__ void add_split(const Scores& ds, int first) {
        SplitRows<kSlabs> f[kBlocks];
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int a = 0; a < kSlabs; ++a) f[n].split_columns(a, ds[a][n]);
        const auto pair = KvTile::row_pair(this->smem() + Base::kKeysAt + first * KvTile::kRowBytes, hide_from_compiler(lane));
        add_split_product<false>(dq, f, params.head_dim,
                                 [=](int step, int block, uint32_t (&b)[2]) { pair.load(step * 8, block, b[0], b[1]); });
    }
    __device__ __forceinline__ void add_rounded(const Scores& ds, int first) {
        Fragments f;
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)
#pragma unroll
            for (int a = 0; a < kSlabs; ++a) to_fragment<T>(f[step][a], ds[a][2 * step], ds[a][2 * step + 1]);
        const auto b_address =
            KvTile::b_trans_address(this->smem() + Base::kKeysAt + first * KvTile::kRowBytes, hide_from_compiler(lane));
        auto product = make_product<T, kChunk / 16, kAhead, kSlabs, kChannelBlocks>(
            [&](int step, uint32_t (&a)[kSlabs][4]) {
#pragma unroll
                for (int i = 0; i < kSlabs * 4; ++i) a[i / 4][i % 4] = f[step][i / 4][i % 4];
            },
            [=](int step, int pair, uint32_t (&b)[4]) { ldmatrix_x4_trans(b, b_address.at(step * 16, pair)); });
        product.start();
        product.add_to(dq, [](int) {});
    }

    __device__ __forceinline__ void loop_over_keys() {
        int cursor = tiles.list_count;
        int tile = tiles.previous(tiles.end, cursor);
#pragma unroll 1
        while (tile >= 0) {
            __syncthreads();  // no warp reads the previous tile
            this->load_keys(tile);
            cp_async_wait<0>();
            __syncthreads();
#pragma unroll 1
            for (int first = 0; first < kBlockN; first += kChunk) add_chunk(tile, first);
            tile = tiles.previous(tile, cursor);
        }
        cp_async_wait<0>();
    }

    __device__ __forceinline__ void store_from_registers() {
        const RowsParams& rows = params.dq;
        const int col = lane % 4 * 2;
        float* matrix =
            static_cast<float*>(rows.data) + work.batch * rows.batch + work.head * rows.head + q_rows.start * rows.row + col;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = this->row_of(a, 2 * r);
                const float factor = row < q_rows.length ? undo_exponent_shift<T>() * params.softmax_scale : 0.0f;
                if (kGeneral && params.adds) {
                    store_sums<kChannelBlocks>(matrix + row * rows.row, row < q_rows.length ? params.head_dim - col : 0,
                                               params.vector_out, 1.0f,
                                               [&](int n, int e) { return dq[a][n][2 * r + e] * factor; });
                    continue;
                }
                if (row >= q_rows.owned) continue;
                store_floats<kChannelBlocks>(matrix + row * rows.row, params.head_dim - col, params.vector_out,
                                             [&](int n, int e) { return dq[a][n][2 * r + e] * factor; });
            }
    }

    // Stages dq in shared memory, in the Q tile, so that the global stores are contiguous.
    __device__ __forceinline__ void store() {
        const float factor = undo_exponent_shift<T>() * params.softmax_scale;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int n = 0; n < kChannelBlocks; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = (warp * kSlabs + a) * 16 + r * 8 + lane / 4;
                    const bool exists = tiles.first_row + row < q_rows.length;
                    const uint32_t pair = exists ? pack_pair(dq[a][n][2 * r] * factor, dq[a][n][2 * r + 1] * factor, T()) : 0;
                    store_shared(this->smem() + QTile::offset(row, n) + lane % 4 * 4, pair);
                }
        __syncthreads();
        const RowsParams& rows = params.dq;
        T* matrix = static_cast<T*>(rows.data) + work.batch * rows.batch + work.head * rows.head + q_rows.start * rows.row;
        QTile::template store<kThreads>(shared, matrix, rows.row, tiles.first_row, q_rows.owned, params.head_dim,
                                        params.vector_out, thread);
    }

    __device__ __forceinline__ void run() {
        const TileCoordinates next = tile_coordinates<kBlockM>(params.query_tile_schedule, params.q_lengths, params.batch);
        if (next.batch < 0) return;
        this->begin(next);
        if (tiles.first_row >= q_rows.owned) return;
        this->load_rows();
        clear(dq);
        loop_over_keys();
        __syncthreads();
        if constexpr (kFloat) {
            store_from_registers();
        } else if (kGeneral && params.wide_dq) {
            store_from_registers();
        } else {
            store();
        }
    }
};

}  // namespace libflash::cuda::sm80
