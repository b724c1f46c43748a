// tdbias, in a launch of its own of the kernel of backward_tangent.cuh: p ((ts - mu) x + y) in the terms of that header, without
// the slope g, summed where the bias is broadcast. A thread block has a tile of the bias and visits the tiles of rows of all
// batch entries and heads that add to it (attention/bias_tile.cuh). As for tdq, rows are queries.
#pragma once

#include "cuda/attention/bias_tile.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"

namespace libflash::cuda::sm80 {

// Body: BackwardTangent. The sums of the tile of the bias are in the first kBlocks blocks of its accumulator.
template <class Body>
struct TangentOfDbias {
    static constexpr int kBlockM = Body::kBlockRows, kBlockN = Body::kBlockCols, kBlocks = Body::kBlocks;
    static_assert(Body::kChannelBlocks >= kBlocks, "the sums must fit");

    Body& body;

    __device__ __forceinline__ void start() const {
        const ScoreGradientParams& bias = body.params.tdbias;
        if (body.thread == 0) body.common().bias_rows.start(body.params, bias, bias_tile_of<kBlockM, kBlockN>(bias, blockIdx.x));
    }

    // The next tile of rows that contributes to the tile of tdbias. batch < 0: there is none. One thread finds it and keeps the
    // state of the search in shared memory, where the state takes no registers.
    __device__ __forceinline__ TileCoordinates next_rows() const {
        BiasRows<kBlockM>& rows = body.common().bias_rows;
        cp_async_wait<0>();  // if a block mask hides all keys of the rows, no tile has waited for the copies of the rows
        __syncthreads();     // no warp reads the previous tiles
        if (body.thread == 0 && !rows.next(body.params, body.params.tdbias)) rows.at.batch = -1;
        __syncthreads();
        return rows.at;
    }

    // Adds the tile of scores whose y has been computed.
    __device__ __forceinline__ void add() const {
#pragma unroll
        for (int i = 0; i < kBlocks * 4; ++i) body.sums[0][i / 4][i % 4] += body.y[0][i / 4][i % 4];
    }

    // Writes the tile of tdbias. The sums are staged in the memory of the rows.
    __device__ __forceinline__ void store() const {
        using T = typename Body::Element;
        float* tile = reinterpret_cast<float*>(body.shared);  // kBlockM x kBlockN
#pragma unroll
        for (int i = 0; i < kBlocks * 4; ++i) {
            const int n = i / 4, e = i % 4, row = body.warp_row() + (e >> 1) * 8 + body.lane / 4;
            if (body.part() == 0) tile[row * kBlockN + n * 8 + body.lane % 4 * 2 + (e & 1)] = body.sums[0][n][e];
        }
        __syncthreads();
        const ScoreGradientParams& to = body.params.tdbias;
        write_bias_tile<kBlockM, kBlockN, Body::kThreads>(
            to, body.common().bias_rows.tile, body.thread, [=](int row, int col) { return tile[row * kBlockN + col]; },
            [&](int64_t at, float sum) { store_number<T>(to.data, at, to.is_float, undo_exponent_shift<T>() * sum); });
    }
};

}  // namespace libflash::cuda::sm80
