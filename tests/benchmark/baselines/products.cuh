// The matrix products of standard attention, each a separate kernel, as in a matrix product library: tiles in
// shared memory by cp.async, ldmatrix, mma.sync, 64 x 64 (or 64 x 32) of the result per warp, stores of 16 bytes.
// If causal, tiles above the diagonal are skipped, which usual implementations of standard attention do not do.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "device.cuh"

namespace baselines::BASELINE_TYPE {

using namespace libflash::cuda;

constexpr int kTile = 128;               // rows and columns of a tile of the scores
constexpr int kProductThreads = 128;     // 2 x 2 warps
constexpr int kDepth = 64, kStages = 3;  // products along the sequence: columns per step, pipeline stages

// Writes accumulators, rounded, to a tile in shared memory from (first_row, 8 * first_chunk) on.
template <class Tile, int kSlabs, int kBlocks>
__device__ __forceinline__ void round_to_tile(uint32_t tile, int first_row, int first_chunk, int lane,
                                              const float (&c)[kSlabs][kBlocks][4]) {
#pragma unroll
    for (int a = 0; a < kSlabs; ++a)
#pragma unroll
        for (int n = 0; n < kBlocks; n += 2) {
            uint32_t f[4];
            to_fragment<T>(f, c[a][n], c[a][n + 1]);
            Tile::store_fragment(tile, first_row + a * 16, first_chunk + n, lane, f);
        }
}

// A tile of A B^T, from (seqlen, head_dim) to (seqlen, pitch): the scores, and the gradient of the weights. Writing the tile to
// global memory takes longer than the product, which has 2 * head_dim operations per element.
template <int kHeadDim>
__global__ void __launch_bounds__(kProductThreads)
    standard_scores_kernel(const T* a_tensor, const T* b_tensor, T* result, Problem p) {
    using Tile = SharedTile<kTile, kHeadDim>;
    using ResultTile = SharedTile<kTile, kTile>;
    extern __shared__ __align__(128) char shared[];
    const int col = blockIdx.x * kTile, row = blockIdx.y * kTile, head = blockIdx.z;
    if (p.causal && col > row) return;
    const int thread = threadIdx.x, lane = thread % 32, row_warp = thread / 32 % 2, col_warp = thread / 64;
    const uint32_t a_smem = shared_address(shared), b_smem = a_smem + Tile::kBytes;
    const int64_t stride = int64_t{p.heads} * kHeadDim;
    Tile::load_async<kProductThreads>(a_smem, head_rows(a_tensor, head, p.heads, p.seqlen, kHeadDim), stride, row, p.seqlen,
                                      kHeadDim, thread);
    Tile::load_async<kProductThreads>(b_smem, head_rows(b_tensor, head, p.heads, p.seqlen, kHeadDim), stride, col, p.seqlen,
                                      kHeadDim, thread);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const auto a_address = Tile::a_address(a_smem, row_warp * 64, lane);
    const auto b_address = Tile::b_address(b_smem + col_warp * 64 * Tile::kRowBytes, lane);
    auto product = make_product<T, kHeadDim / 16, 1, 4, 8>(
        [=](int step, uint32_t (&f)[4][4]) {
#pragma unroll
            for (int a = 0; a < 4; ++a) ldmatrix_x4(f[a], a_address.at(a * 16, step));
        },
        [=](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4(f, b_address.at(pair * 16, step)); });
    float c[4][8][4];
    clear(c);
    product.start();
    product.add_to(c, [](int) {});
    __syncthreads();
    round_to_tile<ResultTile>(a_smem, row_warp * 64, col_warp * 8, lane, c);
    __syncthreads();
    ResultTile::store<kProductThreads>(shared, result + int64_t{head} * p.seqlen * p.pitch + col, p.pitch, row, p.seqlen,
                                       p.pitch - col, true, thread);
}

// 128 rows of factor * A B, or with kTransposed of A^T B, from (seqlen, pitch) and (seqlen, head_dim) to (seqlen, head_dim):
// out = P V, dq = dS K; dv = P^T dout, dk = dS^T q. A is read from global memory, each element for 2 * head_dim operations.
template <int kHeadDim, bool kTransposed>
struct AlongSequence {
    using ATile = SharedTile<kTransposed ? kDepth : kTile, kTransposed ? kTile : kDepth>;
    using BTile = SharedTile<kDepth, kHeadDim>;
    using ResultTile = SharedTile<kTile, kHeadDim>;
    static constexpr int kStageBytes = ATile::kBytes + BTile::kBytes;
    static constexpr int kSharedBytes = kStages * kStageBytes;
    static constexpr int kWarpBlocks = kHeadDim / 2 / 8;
    static_assert(ResultTile::kBytes <= kSharedBytes, "the result takes the tiles' place");

    const T *a, *b;
    int seqlen, pitch, row;
    int64_t stride;
    uint32_t smem;
    int thread;

    __device__ __forceinline__ void load(int stage, int depth) const {
        const uint32_t a_smem = smem + stage * kStageBytes;
        const int first_row = kTransposed ? depth : row, first_col = kTransposed ? row : depth;
        ATile::template load_async<kProductThreads>(a_smem, a + first_col, pitch, first_row, seqlen, pitch - first_col, thread);
        BTile::template load_async<kProductThreads>(a_smem + ATile::kBytes, b, stride, depth, seqlen, kHeadDim, thread);
    }

    __device__ __forceinline__ void multiply(int stage, float (&c)[4][kWarpBlocks][4]) const {
        const int lane = thread % 32, row_warp = thread / 32 % 2, col_warp = thread / 64;
        const uint32_t a_smem = smem + stage * kStageBytes;
        const auto b_address = BTile::template skip_columns<kHeadDim / 32>(BTile::b_trans_address(a_smem + ATile::kBytes, lane),
                                                                           col_warp * (kHeadDim / 32));
        const auto plain = ATile::a_address(a_smem, row_warp * 64, lane);
        const auto transposed = ATile::template skip_columns<4>(ATile::a_trans_address(a_smem, lane), row_warp * 4);
        auto product = make_product<T, kDepth / 16, 1, 4, kWarpBlocks>(
            [=](int step, uint32_t (&f)[4][4]) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if constexpr (kTransposed) {
                        ldmatrix_x4_trans(f[i], transposed.at(step * 16, i));
                    } else {
                        ldmatrix_x4(f[i], plain.at(i * 16, step));
                    }
                }
            },
            [=](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4_trans(f, b_address.at(step * 16, pair)); });
        product.start();
        product.add_to(c, [](int) {});
    }

    // Columns [depth, end) of A, kDepth at a time.
    __device__ __forceinline__ void multiply_columns(int depth, int end, float (&c)[4][kWarpBlocks][4]) const {
        const int steps = (end - depth + kDepth - 1) / kDepth;
#pragma unroll
        for (int s = 0; s < kStages - 1; ++s) {
            if (s < steps) load(s, depth + s * kDepth);
            cp_async_commit();
        }
        int stage = 0;
#pragma unroll 1
        for (int s = 0; s < steps; ++s) {
            cp_async_wait<kStages - 2>();
            __syncthreads();  // the stage has arrived; the one before it is no longer read
            const int ahead = s + kStages - 1;
            if (ahead < steps) load(stage == 0 ? kStages - 1 : stage - 1, depth + ahead * kDepth);
            cp_async_commit();
            multiply(stage, c);
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        cp_async_wait<0>();
        __syncthreads();
    }
};

template <int kHeadDim, bool kTransposed>
__global__ void __launch_bounds__(kProductThreads)
    standard_product_kernel(const T* a, const T* b, T* result, float factor, Problem p) {
    using Body = AlongSequence<kHeadDim, kTransposed>;
    extern __shared__ __align__(128) char shared[];
    const int row = blockIdx.x * kTile, head = blockIdx.y, thread = threadIdx.x, lane = thread % 32;
    const int64_t stride = int64_t{p.heads} * kHeadDim;
    const Body body{a + int64_t{head} * p.seqlen * p.pitch,
                    head_rows(b, head, p.heads, p.seqlen, kHeadDim),
                    p.seqlen,
                    p.pitch,
                    row,
                    stride,
                    shared_address(shared),
                    thread};
    float c[4][Body::kWarpBlocks][4];
    clear(c);
    const int first = kTransposed && p.causal ? row : 0;
    body.multiply_columns(first, !kTransposed && p.causal ? min(p.seqlen, row + kTile) : p.seqlen, c);
#pragma unroll
    for (int i = 0; i < 4 * Body::kWarpBlocks * 4; ++i)
        c[i / (Body::kWarpBlocks * 4)][i / 4 % Body::kWarpBlocks][i % 4] *= factor;
    round_to_tile<typename Body::ResultTile>(body.smem, thread / 32 % 2 * 64, thread / 64 * Body::kWarpBlocks, lane, c);
    __syncthreads();
    Body::ResultTile::template store<kProductThreads>(shared, head_rows(result, head, p.heads, p.seqlen, kHeadDim), stride, row,
                                                      p.seqlen, kHeadDim, true, thread);
}

}  // namespace baselines::BASELINE_TYPE
