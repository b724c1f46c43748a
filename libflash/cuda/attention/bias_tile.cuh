// The gradient of the bias, and its tangent: sums over the dimensions in which the bias is broadcast. A thread block computes one
// tile of the bias: it adds the contributions of all batch entries, heads and tiles that share this tile. So every element is
// written once and its sum has a fixed order.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"

namespace libflash::cuda {

struct BiasTile {
    int batch, head, row, col;  // row, col: of tiles
};

__device__ __forceinline__ int tile_count(int extent, int tile) { return (extent + tile - 1) / tile; }

// The tile of the bias (kBlockM x kBlockN elements) that a thread block computes.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ BiasTile bias_tile_of(const ScoreGradientParams& bias, unsigned block) {
    const int cols = tile_count(bias.extent[3], kBlockN), rows = tile_count(bias.extent[2], kBlockM);
    const int col = block % cols, row = block / cols % rows, batch_head = block / cols / rows;
    return {batch_head / bias.extent[1], batch_head % bias.extent[1], row, col};
}

// In one dimension, the indices (or tiles) that share element (or tile) `index` of the bias: all of them if the bias is
// broadcast.
struct BiasRange {
    int begin, end;

    BiasRange() = default;
    __device__ __forceinline__ BiasRange(int index, int extent, int all) {
        begin = extent == 1 ? 0 : index;
        end = extent == 1 ? all : index + 1;
    }
};

// The tiles of query rows that add to a tile of the bias, one after the other.
template <int kBlockM>
struct BiasRows {
    BiasTile tile;
    TileCoordinates at;
    BiasRange row_tiles;  // of the batch entry

    // The first next() goes to the first tile.
    template <class Params>
    __device__ __forceinline__ void start(const Params& params, const ScoreGradientParams& bias, const BiasTile& of) {
        tile = of;
        at = {BiasRange(of.batch, bias.extent[0], params.batch).begin - 1, params.heads_q, 0};
        row_tiles.begin = row_tiles.end = 0;
    }
    // Returns false if none is left.
    template <class Params>
    __device__ __forceinline__ bool next(const Params& params, const ScoreGradientParams& bias) {
        const BiasRange batches(tile.batch, bias.extent[0], params.batch), heads(tile.head, bias.extent[1], params.heads_q);
        ++at.tile;
        while (at.tile >= row_tiles.end) {
            if (++at.head >= heads.end) {
                at.head = heads.begin;
                if (++at.batch >= batches.end) return false;
                const int queries = SequenceRows::of(params.q_lengths, at.batch).length;
                row_tiles = BiasRange(tile.row, bias.extent[2], tile_count(queries, kBlockM));
            }
            at.tile = row_tiles.begin;
        }
        return true;
    }
};

// Writes a tile. value(row, col): a sum of the tile; where the bias is broadcast over rows or columns, these sums are added here.
// write(index, sum) stores an element.
template <int kBlockM, int kBlockN, int kThreads, class Value, class Write>
__device__ __forceinline__ void write_bias_tile(const ScoreGradientParams& bias, const BiasTile& tile, int thread,
                                                const Value& value, const Write& write) {
    const int64_t start = tile.batch * bias.stride[0] + tile.head * bias.stride[1];
    const int rows = bias.extent[2] == 1 ? 1 : min(kBlockM, bias.extent[2] - tile.row * kBlockM);
    const int cols = bias.extent[3] == 1 ? 1 : min(kBlockN, bias.extent[3] - tile.col * kBlockN);
    const int same_rows = bias.extent[2] == 1 ? kBlockM : 1, same_cols = bias.extent[3] == 1 ? kBlockN : 1;
#pragma unroll 1
    for (int i = thread; i < rows * cols; i += kThreads) {
        const int row = i / cols, col = i % cols;
        decltype(value(0, 0) + 0) sum = 0;
#pragma unroll 1
        for (int r = 0; r < same_rows; ++r)
#pragma unroll 1
            for (int c = 0; c < same_cols; ++c) sum += value(row + r, col + c);
        const int64_t at =
            (int64_t{tile.row} * kBlockM + row) * bias.stride[2] + (int64_t{tile.col} * kBlockN + col) * bias.stride[3];
        write(start + at, sum);
    }
}

}  // namespace libflash::cuda
