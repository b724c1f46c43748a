// backward_tangent.cuh with more than 256 channels (float32: 128): the tensors of a tile of columns are loaded one after the
// other into the same tile, and for each of dP and the scores also the two tensors of the rows. The warps that share rows add
// their parts of dP and of the scores through the memory of the tile of columns; therefore the tensors of the last product are
// loaded once more.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm80/score_parts.cuh"
#include "cuda/tile/product.cuh"

namespace libflash::cuda::sm80 {

// Body: BackwardTangent.
template <class Body>
struct BackwardTangentInTurn {
    using Scores = typename Body::Scores;
    using RowTile = typename Body::RowTile;
    using ColTile = typename Body::ColTile;
    using Parts = ScoreParts<Body::kParts, Body::kThreads, Body::kBlocks>;
    static_assert(Parts::kBytes <= ColTile::kBytes, "parts of scores take the place of the columns");

    Body& body;

    __device__ __forceinline__ bool has(int i) const { return body.tensor(!body.transposed(), i).data; }

    // Loads tensor number `i` of the columns. with_rows: also the two tensors of the rows from number `i` on and, if
    // transposed(), the statistics.
    __device__ __forceinline__ void load(int i, bool with_rows, int head, int tile) const {
        const bool transposed = body.transposed();
        const int first = tile * Body::kBlockCols;
        __syncthreads();  // no warp reads the previous tensors
        body.template load_side<ColTile>(Body::kColsAt, !transposed, body.column_head(head), first, i, 1);
        if (with_rows) {
            body.template load_side<RowTile>(0, transposed, transposed ? body.common().work.head : head, body.first_row(), i, 2);
            if (transposed) body.load_statistics(head, first, Body::kBlockCols);
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
    }

    // A step of s = X C^T and ts = tX C^T + X tC^T. of_tangent: with tC, else with C.
    __device__ __forceinline__ void multiply(int pair, bool of_tangent) const {
        const int channels = pair == 0 ? body.params.head_dim : body.params.head_dim_v;
        if (of_tangent) return body.add_product(body.ts, Body::row_tile(0), Body::kColsAt, channels);
        clear(body.s);
        clear(body.ts);
        body.add_product(body.s, Body::row_tile(0), Body::kColsAt, channels);
        if (body.tensor(body.transposed(), pair + 1).data) body.add_product(body.ts, Body::row_tile(1), Body::kColsAt, channels);
    }

    // Adds one tile of the other side, for one query head. First dP and its tangent, if needed, then the scores and theirs, then
    // the last product. One loop, so that the code for loads and products exists only once.
    __device__ __forceinline__ void add_tile(int head, int tile) const {
        const bool of_scores = body.of_scores();
        const uint32_t keep = body.keep_elements(head, tile * Body::kBlockCols);
#pragma unroll 1
        for (int step = of_scores ? 0 : 1; step < (body.computes_dbias() ? 2 : 3); ++step) {
            const int pair = step == 0 || (step == 2 && !of_scores) ? 2 : 0;
#pragma unroll 1
            for (int i = pair; i < pair + 2; ++i) {
                if (!has(i)) continue;
                load(i, step < 2 && i == pair, head, tile);
                if (step < 2) {
                    multiply(pair, i > pair);
                } else {
                    add_sums(pair, i > pair);
                }
            }
            if (step == 2) break;
            Parts{body.smem() + Body::kColsAt, body.thread}.add(body.s, body.ts);
            if (step == 0) {
                body.copy_scores();
                body.subtract_deltas(keep);
            } else {
                body.apply_rules(head, tile);
                body.make_weights(keep);
                if (!of_scores) body.copy_scores();
            }
        }
        if (body.computes_dbias()) body.of_dbias().add();
    }
    // A step of sums += y C + x tC.
    __device__ __forceinline__ void add_sums(int pair, bool of_tangent) const {
        if (of_tangent) copy(body.y, body.x);
        body.add_sums(body.y, Body::kColsAt, pair == 0 ? body.params.head_dim : body.params.head_dim_v);
    }
    __device__ static __forceinline__ void copy(Scores& to, const Scores& from) {
#pragma unroll
        for (int i = 0; i < Body::kBlocks * 4; ++i) to[0][i / 4][i % 4] = from[0][i / 4][i % 4];
    }
};

}  // namespace libflash::cuda::sm80
