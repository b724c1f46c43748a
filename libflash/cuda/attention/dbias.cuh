// dbias: dS summed over the dimensions in which the bias is broadcast. A thread block computes one tile of dbias and loops over
// all batch entries, heads and tiles that share it, so every element is written once and its sum has a fixed order.
#pragma once

#include "cuda/attention/query_rows.cuh"

namespace libflash::cuda {

template <class T, int kHeadDim>
struct Dbias : QueryRows<T, kHeadDim, true> {
    using Base = QueryRows<T, kHeadDim, true>;
    using Base::kBlockM, Base::kBlockN, Base::kChunk, Base::kSlabs, Base::kThreads, Base::kBlocks;
    using Base::params, Base::shared, Base::work, Base::q_rows, Base::tiles, Base::lane, Base::warp, Base::thread;
    using typename Base::Scores;
    static constexpr int kChunks = kBlockN / kChunk;
    static constexpr int kSumBytes = kBlockM * kBlockN * 4;  // in the same memory as the tiles
    static constexpr int kSharedBytes = Base::kSharedBytes > kSumBytes ? Base::kSharedBytes : kSumBytes;

    float sums[kChunks][kSlabs][kBlocks][4];

    using Base::Base;

    // In one dimension, the indices (or tiles) that share element (or tile) `index` of the bias: all of them if the bias is
    // broadcast.
    struct Range {
        int begin, end;
        __device__ __forceinline__ Range(int index, int extent, int all) {
            begin = extent == 1 ? 0 : index;
            end = extent == 1 ? all : index + 1;
        }
    };

    __device__ static __forceinline__ int row_tiles(const BackwardParams& params) {
        return tiles_of(params.dbias.extent[2], kBlockM);
    }
    __device__ static __forceinline__ int col_tiles(const BackwardParams& params) {
        return tiles_of(params.dbias.extent[3], kBlockN);
    }
    __device__ static __forceinline__ int tiles_of(int extent, int tile) { return (extent + tile - 1) / tile; }

    // Adds dS of the current head and query tile for the key tiles in `cols`.
    __device__ __forceinline__ void add_head_tile(const Range& cols) {
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

    // Stages the sums in shared memory. If the bias is broadcast over rows or columns, they are added up here.
    __device__ __forceinline__ void store(int batch, int head, int row_tile, int col_tile) {
        const ScoreGradientParams& out = params.dbias;
        const int64_t start = batch * out.stride[0] + head * out.stride[1];
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
        const int rows = out.extent[2] == 1 ? 1 : min(kBlockM, out.extent[2] - row_tile * kBlockM);
        const int cols = out.extent[3] == 1 ? 1 : min(kBlockN, out.extent[3] - col_tile * kBlockN);
        const int same_rows = out.extent[2] == 1 ? kBlockM : 1, same_cols = out.extent[3] == 1 ? kBlockN : 1;
        for (int i = thread; i < rows * cols; i += kThreads) {
            const int row = i / cols, col = i % cols;
            float sum = 0.0f;
            for (int r = 0; r < same_rows; ++r)
                for (int k = 0; k < same_cols; ++k) sum += tile[(row + r) * kBlockN + col + k];
            const int64_t at =
                (int64_t{row_tile} * kBlockM + row) * out.stride[2] + (int64_t{col_tile} * kBlockN + col) * out.stride[3];
            store_number<T>(out.data, start + at, out.is_float, undo_exponent_shift<T>() * sum);
        }
    }

    __device__ __forceinline__ void run() {
        const ScoreGradientParams& out = params.dbias;
        const int col_tile = blockIdx.x % col_tiles(params), row_tile = blockIdx.x / col_tiles(params) % row_tiles(params);
        const int batch_head = blockIdx.x / col_tiles(params) / row_tiles(params);
        const int batch = batch_head / out.extent[1], head = batch_head % out.extent[1];
        const Range batches(batch, out.extent[0], params.batch), heads(head, out.extent[1], params.heads_q);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) clear(sums[c]);
        for (int b = batches.begin; b < batches.end; ++b) {
            const int length_q = SequenceRows::of(params.q_lengths, b).length,
                      length_k = SequenceRows::of(params.k_lengths, b).length;
            const Range rows(row_tile, out.extent[2], tiles_of(length_q, kBlockM));
            const Range cols(col_tile, out.extent[3], tiles_of(length_k, kBlockN));
            for (int h = heads.begin; h < heads.end; ++h)
                for (int r = rows.begin; r < rows.end; ++r) {
                    this->begin({b, h, r});
                    add_head_tile(cols);
                }
        }
        store(batch, head, row_tile, col_tile);
    }
};

}  // namespace libflash::cuda
