// dbias: dS summed over the dimensions in which the bias is broadcast, a tile for each thread block (bias_tile.cuh).
#pragma once

#include "cuda/attention/bias_tile.cuh"
#include "cuda/attention/query_rows.cuh"

namespace libflash::cuda {

template <class T, int kHeadDim>
struct Dbias : QueryRows<T, kHeadDim, true> {
    using Base = QueryRows<T, kHeadDim, true>;
    using Base::kBlockM, Base::kBlockN, Base::kChunk, Base::kSlabs, Base::kThreads, Base::kBlocks;
    using Base::params, Base::shared, Base::work, Base::q_rows, Base::tiles, Base::lane, Base::warp, Base::thread;
    using typename Base::Scores;
    static constexpr int kChunks = kBlockN / kChunk;
    static constexpr int kSumBytes = kBlockM * kBlockN * 4;  // the sums overwrite the tiles
    static constexpr int kSharedBytes = Base::kSharedBytes > kSumBytes ? Base::kSharedBytes : kSumBytes;

    float sums[kChunks][kSlabs][kBlocks][4];

    using Base::Base;

    // Adds dS of the current head and query tile for the key tiles in `cols`.
    __device__ __forceinline__ void add_head_tile(const BiasRange& cols) {
        int cursor = tiles.list_count;
        bool rows_loaded = false;
        for (int tile = tiles.previous(min(tiles.end, cols.end), cursor); tile >= cols.begin;
             tile = tiles.previous(tile, cursor)) {
            __syncthreads();  // no warp reads the previous tiles
            if (!rows_loaded) this->load_rows();
            rows_loaded = true;
            this->load_keys(tile);
            cp_async_wait<0>();
            __syncthreads();
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                Scores ds;
                this->template gradients<false>(ds, tile, c * kChunk);
                this->for_all(ds, tile, c * kChunk, [&](float& x, int row, int col) {
                    if (row >= q_rows.length || col >= tiles.length_k) x = 0.0f;
                });
#pragma unroll
                for (int i = 0; i < kSlabs * kBlocks * 4; ++i)
                    sums[c][i / (kBlocks * 4)][i / 4 % kBlocks][i % 4] += ds[i / (kBlocks * 4)][i / 4 % kBlocks][i % 4];
            }
        }
    }

    // Stages the sums in shared memory.
    __device__ __forceinline__ void store(const BiasTile& at) {
        const ScoreGradientParams& out = params.dbias;
        float* tile = reinterpret_cast<float*>(shared);  // kBlockM x kBlockN
        __syncthreads();
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
#pragma unroll
            for (int a = 0; a < kSlabs; ++a)
#pragma unroll
                for (int n = 0; n < kBlocks; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int row = (warp * kSlabs + a) * 16 + (e >> 1) * 8 + lane / 4;
                        tile[row * kBlockN + c * kChunk + n * 8 + lane % 4 * 2 + (e & 1)] = sums[c][a][n][e];
                    }
        __syncthreads();
        write_bias_tile<kBlockM, kBlockN, kThreads>(
            out, at, thread, [=](int row, int col) { return tile[row * kBlockN + col]; },
            [&](int64_t index, float sum) { store_number<T>(out.data, index, out.is_float, undo_exponent_shift<T>() * sum); });
    }

    __device__ __forceinline__ void run() {
        const ScoreGradientParams& out = params.dbias;
        const BiasTile at = bias_tile_of<kBlockM, kBlockN>(out, blockIdx.x);
        const BiasRange batches(at.batch, out.extent[0], params.batch), heads(at.head, out.extent[1], params.heads_q);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) clear(sums[c]);
        for (int b = batches.begin; b < batches.end; ++b) {
            const int length_q = SequenceRows::of(params.q_lengths, b).length,
                      length_k = SequenceRows::of(params.k_lengths, b).length;
            const BiasRange rows(at.row, out.extent[2], tile_count(length_q, kBlockM));
            const BiasRange cols(at.col, out.extent[3], tile_count(length_k, kBlockN));
            for (int h = heads.begin; h < heads.end; ++h)
                for (int r = rows.begin; r < rows.end; ++r) {
                    this->begin({b, h, r});
                    add_head_tile(cols);
                }
        }
        store(at);
    }
};

}  // namespace libflash::cuda
