// The dQ warpgroup of the sm_90a backward kernel: all four warps compute dS K and add it to the dQ accumulator; one thread is the
// producer. The consumer warpgroups need no barrier between each other: only the stages of dS bound their distance.
#pragma once

#include "cuda/ptx/reduction.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_producer.cuh"
#include "cuda/sm90/backward_zero_fill.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardDqWarpgroup {
    using T = typename Traits::T;
    using KvTile = typename Traits::KvTile;
    using ScoreTile = typename Traits::ScoreTile;
    using Accumulator = typename Traits::Accumulator;
    static constexpr int kPieces = Traits::kPieces;

    const BackwardContext<Traits>& context;
    const BackwardQueryTiles<Traits> query_tiles{context};
    const BackwardProducer<Traits> producer{context};
    const BackwardZeroFill<Traits> zero_fill{context};

    __device__ __forceinline__ void run() const {
        auto& storage = context.storage;
        const int warp = uniform_warp(), lane = threadIdx.x & 31;
        const bool loads = warp == 0 && elect_one();
        if (loads) producer.begin();
        __syncwarp();
        auto at = query_tiles.first();
        PipelineState<Traits::kScoreStages> gradients(storage.gradients);
        storage.keys().wait(0);
        zero_fill.keys();
#pragma unroll 1
        for (; at.left > 0; query_tiles.advance(at)) {
            gradients.wait_full();
            // Does not block: the consumers released this stage, that of the previous tile, before they published this dS.
            if (loads) producer.load_queries();
            __syncwarp();
            float* const sums =
                context.params.dq_accumulator + Accumulator::tile_offset(storage.first_unit(context.params, at), at.tile);
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece)
                add_piece(context.tiles.ds(gradients.stage), sums, piece, warp, lane, [&] {
                    if (piece == kPieces - 1 && lane == 0) gradients.empty().arrive();
                });
            gradients.advance();
        }
    }

private:
    // Computes and adds one piece of 64 rows x 64 channels. Calls release() when the product is complete.
    template <class Release>
    __device__ __forceinline__ void add_piece(uint32_t ds, float* sums, int piece, int warp, int lane,
                                              const Release& release) const {
        constexpr int kRowPieces = Traits::kBlockM / 64;
        const int row_piece = piece % kRowPieces, col_piece = piece / kRowPieces;
        float dq[32];
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Traits::kBlockN / 16; ++step)
            Wgmma<T, 64>::template multiply_shared<true, true>(
                dq, ScoreTile::mn_major_operand(ds + row_piece * ScoreTile::kChunkBytes, step),
                KvTile::mn_major_operand(context.tiles.k() + col_piece * KvTile::kChunkBytes, step), step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_operand(dq);
        release();
        float* const piece_sums = sums + (piece * 4 + warp) * Accumulator::kWarpFloats;
#pragma unroll
        for (int n = 0; n < 8; ++n)
            WarpQuad::add(piece_sums + n * 128, lane, {dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]});
    }
};

}  // namespace libflash::cuda::sm90
