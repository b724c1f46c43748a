// The main loop of forward_tangent.cuh with more than 256 channels (float32: 128): K, tK, V and tV are loaded one after the other
// into the same tile. The warps that share rows add their parts of the scores through the memory of that tile.
#pragma once

#include "cuda/attention/schedule.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm80/score_parts.cuh"
#include "cuda/tile/product.cuh"

namespace libflash::cuda::sm80 {

// Body: ForwardTangent.
template <class Body>
struct ForwardTangentInTurn {
    using KvTile = typename Body::KvTile;
    using Parts = ScoreParts<Body::kParts, Body::kThreads, Body::kKeyBlocks>;
    static_assert(Parts::kBytes <= KvTile::kBytes && Body::kSlabs == 1);

    Body& body;

    // 0: K, 1: tK, 2: V, 3: tV.
    __device__ __forceinline__ const RowsParams& tensor(int i) const {
        const ForwardTangentParams& params = body.params;
        return i == 0 ? params.k : i == 1 ? params.tk : i == 2 ? params.v : params.tv;
    }

    __device__ __forceinline__ void load(int i, int tile) const {
        __syncthreads();  // no warp reads the previous tensor
        body.template load<KvTile>(Body::kKeysAt, tensor(i), body.common().k_rows,
                                   body.common().work.head / body.params.group_size, tile * Body::kKeyBlocks * 8,
                                   i < 2 ? body.params.head_dim : body.params.head_dim_v);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
    }

    // A step of s = Q K^T and ts = tQ K^T + Q tK^T. of_tangent: with tK, else with K.
    __device__ __forceinline__ void multiply(bool of_tangent) const {
        if (of_tangent) return body.add_scores(body.ts, 0, Body::kKeysAt);
        clear(body.s);
        clear(body.ts);
        body.add_scores(body.s, 0, Body::kKeysAt);
        if (body.params.tq.data) body.add_scores(body.ts, Body::kTangentQAt, Body::kKeysAt);
    }
    // A step of tout += ts V + s tV. With tV, s takes the place of ts, which is no longer needed.
    __device__ __forceinline__ void add_values(bool of_tangent) const {
        if (of_tangent) {
#pragma unroll
            for (int i = 0; i < Body::kKeyBlocks * 4; ++i) body.ts[0][i / 4][i % 4] = body.s[0][i / 4][i % 4];
        }
        body.add_values(body.ts, Body::kKeysAt);
    }

    __device__ __forceinline__ void add_tile(int tile) const {
        // One loop, so that the code for loads and products exists only once.
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            if (i == 2) {
                Parts{body.smem() + Body::kKeysAt, body.thread}.add(body.s, body.ts);
                body.make_weights(tile);
            }
            if (!tensor(i).data) continue;
            load(i, tile);
            if (i < 2) {
                multiply(i == 1);
            } else {
                add_values(i == 3);
            }
        }
    }

    __device__ __forceinline__ void loop_over_keys() const {
        const auto& tiles = body.common().tiles;
        int cursor = tiles.list_count;
#pragma unroll 1
        for (int tile = tiles.previous(tiles.end, cursor); tile >= 0; tile = tiles.previous(tile, cursor)) add_tile(tile);
        // If there was no key tile, the copies of Q may still be in flight. The result is staged in the memory of Q.
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
    }
};

}  // namespace libflash::cuda::sm80
