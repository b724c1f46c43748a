// The dQ warpgroup of the sm_90a backward kernel computes dS K and adds it to the dQ accumulator by bulk additions. A warp does
// not wait until its additions are complete, but only until the buffer that it overwrites has been read. (With a fixed order two
// threads of the producer warpgroup add and release the buffers: backward_fixed_order.cuh.) There is no barrier between the
// consumer warpgroups: only the number of stages of dS limits how far one can be ahead of the other.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_fixed_order.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardDqWarpgroup {
    using T = typename Traits::T;
    using KvTile = typename Traits::KvTile;
    using ScoreTile = typename Traits::ScoreTile;
    using Accumulator = typename Traits::Accumulator;
    static constexpr int kPieces = Traits::kPieces;

    BackwardContext<Traits>& context;
    const BackwardWorkTiles<Traits> work_tiles{context};
    const BackwardQueryTiles<Traits> query_tiles{context};

    __device__ __forceinline__ void run() const {
        const int warp = uniform_warp() - 4, lane = threadIdx.x & 31;
        PipelineState<Traits::kScoreStages> gradients(context.storage.gradients);
#pragma unroll 1
        while (work_tiles.wait()) {
            work_tiles.wait_for_k();
            add_work_tile(gradients, warp, lane);
            work_tiles.release_k(lane);
            work_tiles.release();
        }
        if (lane == 0) tma_store_wait_read<0>();
    }

private:
    using Tiles = BackwardSharedTiles<Traits>;
    using Buffers = BackwardSumBuffers<Traits>;
    static constexpr int kParts = Traits::kPieceParts, kPartBlocks = Traits::kPieceCols / 8 / kParts;

    __device__ __forceinline__ void add_work_tile(PipelineState<Traits::kScoreStages>& gradients, int warp, int lane) const {
        const auto& storage = context.storage;
        const uint32_t tiles = uniform(context.tiles.address()), k = uniform(context.k());
#pragma unroll 1
        for (auto at = query_tiles.first(); at.left > 0; query_tiles.advance(at)) {
            gradients.wait_full();
            const uint32_t ds = uniform(Tiles::ds(tiles, gradients.stage));
            float* const sums = context.params.dq_accumulator +
                                Accumulator::tile_offset(context.tile().first_unit(context.params, at), at.tile) +
                                warp * Accumulator::kWarpFloats;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                float dq[Traits::kPieceCols / 2];
                multiply(dq, ds, k, piece);
                if (piece == kPieces - 1 && lane == 0) gradients.empty().arrive();
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    const int buffer = Buffers::buffer(piece, part);
                    if constexpr (Traits::kFixedOrder) {
                        storage.sum_is_empty(buffer).wait(Buffers::phase(piece, part, gradients.stage) ^ 1);
                    } else {
                        if (lane == 0) tma_store_wait_read<Traits::kSumBuffers - 1>();
                        __syncwarp();
                    }
                    const uint32_t staged = Tiles::sums(tiles) + (buffer * 4 + warp) * Traits::kSumBytes;
                    leave(dq, part, staged, lane);
                    if (lane != 0) continue;
                    if constexpr (Traits::kFixedOrder) {
                        storage.sum_is_full(gradients.stage, buffer).arrive();
                    } else {
                        tma_add_floats(sums + (piece * 4 * Accumulator::kWarpFloats + part * kPartBlocks * 128), staged,
                                       Traits::kSumBytes);
                        tma_store_commit();
                    }
                }
            }
            gradients.advance();
        }
    }

    // Computes one piece of 64 rows x kPieceCols channels.
    __device__ static __forceinline__ void multiply(float (&dq)[Traits::kPieceCols / 2], uint32_t ds, uint32_t k, int piece) {
        constexpr int kRowPieces = Traits::kBlockM / 64;
        const int row_piece = piece % kRowPieces, col_piece = piece / kRowPieces;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Traits::kBlockN / 16; ++step)
            Wgmma<T, Traits::kPieceCols>::template multiply_shared<true, true>(
                dq, ScoreTile::mn_major_operand(ds + row_piece * ScoreTile::kChunkBytes, step),
                KvTile::mn_major_operand(k + col_piece * KvTile::kChunkBytes, step), step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_operand(dq);
    }
    // Writes a part of the warp's sums of a piece to shared memory at `staged`, for a bulk addition.
    __device__ static __forceinline__ void leave(const float (&dq)[Traits::kPieceCols / 2], int part, uint32_t staged, int lane) {
#pragma unroll
        for (int n = 0; n < kPartBlocks; ++n) {
            const float* const x = dq + (part * kPartBlocks + n) * 4;
            store_shared_16(staged + n * 512 + lane * 16, x[0], x[1], x[2], x[3]);
        }
        fence_shared_for_async();
        __syncwarp();
    }
};

}  // namespace libflash::cuda::sm90
