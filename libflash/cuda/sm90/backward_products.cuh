// The matrix products of a consumer warpgroup of the sm_90a backward kernel, and dS in shared memory.
#pragma once

#include "cuda/ptx/uniform.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardProducts {
    using T = typename Traits::T;
    using KvTile = typename Traits::KvTile;
    using QTile = typename Traits::QTile;
    using ScoreTile = typename Traits::ScoreTile;
    using Tiles = BackwardSharedTiles<Traits>;
    static constexpr int kHeadDim = Traits::kHeadDim;
    using Sums = float[kHeadDim / 2];
    // Channels of dK or dV that one wgmma computes. With 512 threads the compiler accepts no wgmma with 128 accumulator
    // registers.
    static constexpr int kColumns = kHeadDim > 192 ? kHeadDim / 2 : kHeadDim;

    // Shared addresses of the tiles and of this lane's part of dS in the first stage.
    struct Addresses {
        uint32_t tiles, ds;
        int first_row;  // of the warpgroup, in the key tile
    };
    // `warp`: the number of the warp among the consumers.
    __device__ static __forceinline__ Addresses addresses(const BackwardContext<Traits>& context, int warp, int lane) {
        const uint32_t tiles = uniform(context.tiles.address());
        return {tiles, Tiles::ds(tiles, 0) + ScoreTile::offset(warp * 16 + (lane & 15), lane >> 4),
                warp / 4 * Traits::kGroupKeys};
    }

    // Issues one wgmma group: S^T = K Q^T or dP^T = V dO^T, of kQueries queries from `first_query` on. `keys`, `queries`: shared
    // addresses of the tiles.
    template <int kQueries>
    __device__ static __forceinline__ void issue_scores(float (&scores)[kQueries / 2], uint32_t keys, int first_key,
                                                        uint32_t queries, int first_query = 0) {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            Wgmma<T, kQueries>::template multiply_shared<false>(scores, KvTile::k_major_operand(keys, step, first_key),
                                                                QTile::k_major_operand(queries, step, first_query), step > 0);
        wgmma_commit();
    }
    // Issues sums += weights * rows of a tile of Q or dO, from `first_query` on. The caller issues fence and commit.
    template <int kSteps>
    __device__ static __forceinline__ void add(Sums& sums, const uint32_t (&weights)[kSteps][4], uint32_t queries,
                                               int first_query = 0) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int col = 0; col < kHeadDim; col += kColumns)
                Wgmma<T, kColumns>::template multiply<true>(
                    reinterpret_cast<float (&)[kColumns / 2]>(sums[col / 2]), weights[step],
                    QTile::mn_major_operand(queries + col / QTile::kChunkCols * QTile::kChunkBytes, first_query / 16 + step),
                    true);
    }

    // Stores dS of 16 kSteps queries for the dQ warpgroup. The swizzle moves a step of 16 queries by an exclusive or.
    template <int kSteps>
    __device__ static __forceinline__ void store_ds(const Addresses& addresses, int stage, const uint32_t (&ds)[kSteps][4],
                                                    int first_query = 0) {
        static_assert(Traits::kBlockM == 64, "a row of dS is one chunk of the tile");
        const uint32_t tile = addresses.ds + stage * ScoreTile::kBytes;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) stmatrix_x4(tile ^ (first_query * 2 + step * 32), ds[step]);
    }
    // Loads the warp's part of P for 16 queries. The warp's part of dS will overwrite it.
    __device__ static __forceinline__ void load_p(const Addresses& addresses, int stage, int step, uint32_t (&p)[4]) {
        static_assert(Traits::kDividesProducts, "only there is P in shared memory");
        ldmatrix_x4(p, (addresses.ds + stage * ScoreTile::kBytes) ^ (step * 32));
    }
    // Publishes the stored dS: the fence makes it visible to wgmma, which reads shared memory through the async proxy.
    __device__ static __forceinline__ void publish_ds(PipelineState<Traits::kScoreStages>& gradients, int lane) {
        fence_shared_for_async();
        __syncwarp();
        if (lane == 0) gradients.full().arrive();
        gradients.advance();
    }
};

}  // namespace libflash::cuda::sm90
