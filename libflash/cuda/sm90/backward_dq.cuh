// The dQ warpgroup of the sm_90a backward kernel. One of its threads is the producer: it loads K, V, Q, dO and softmax statistics
// by TMA. All four warps compute dS K and add it to the dQ accumulator. The consumer warpgroups need no barrier between each
// other: only the stages of dS bound their distance.
#pragma once

#include "cuda/ptx/reduction.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_work.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel>
struct BackwardDq : BackwardWork<Kernel> {
    using Base = BackwardWork<Kernel>;
    using Base::advance, Base::Base, Base::common, Base::dout_smem, Base::ds_smem, Base::statistics, Base::first_position,
        Base::first_unit, Base::k_smem, Base::kBlockM, Base::kBlockN, Base::keys_have_come, Base::kStatisticsBytes,
        Base::kHeadDim, Base::kPieces, Base::kScoreStages, Base::kStages, Base::maps, Base::params, Base::q_smem, Base::v_smem;
    using typename Base::Copies, typename Base::KvTile, typename Base::Position, typename Base::QTile, typename Base::ScoreTile,
        typename Base::Accumulator, typename Base::T;

    __device__ __forceinline__ void load_keys() const {
        const MBarrier barrier = keys_have_come();
        barrier.arrive_and_expect(2 * KvTile::kBytes);
        KvTile::load(k_smem(), maps.k, barrier, common.tiles.first_col, common.work.head, common.work.batch);
        KvTile::load(v_smem(), maps.v, barrier, common.tiles.first_col, common.work.head, common.work.batch);
    }
    __device__ __forceinline__ void load_queries() const {
        Copies& next = common.copies;
        if (next.at.left <= 0) return;
        PipelineState<kStages> queries(common.queries, next.stage, next.phase);
        queries.wait_empty();
        const MBarrier full = queries.full();
        const int row = next.at.tile * kBlockM;
        full.arrive_and_expect(2 * QTile::kBytes + kStatisticsBytes);
        QTile::load(q_smem(queries.stage), maps.q, full, row, next.at.head, common.work.batch);
        tma_load_bytes(shared_address(statistics(queries.stage)),
                       params.softmax_statistics + first_unit(next.at) * kUnitRows + row, kStatisticsBytes, full);
        QTile::load(dout_smem(queries.stage), maps.dout, full, row, next.at.head, common.work.batch);
        queries.advance();
        next.stage = queries.stage;
        next.phase = queries.phase;
        advance(next.at);
    }

    __device__ __forceinline__ void add_to_sums() const {
        const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x & 31;
        const bool copies = warp == 0 && elect_one();
        if (copies) {
            load_keys();
            common.copies = {first_position(), 0, 0};
#pragma unroll 1
            for (int i = 0; i < kStages - 1; ++i) load_queries();
        }
        __syncwarp();
        Position at = first_position();
        PipelineState<kScoreStages> gradients(common.gradients);
        keys_have_come().wait(0);
#pragma unroll 1
        for (; at.left > 0; advance(at)) {
            gradients.wait_full();
            // Does not block: the consumers released this stage, that of the previous tile, before they published this dS.
            if (copies) load_queries();
            __syncwarp();
            float* const sums = params.dq_accumulator + Accumulator::tile_offset(first_unit(at), at.tile);
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece)
                add_piece(ds_smem(gradients.stage), sums, piece, warp, lane, [&] {
                    if (piece == kPieces - 1 && lane == 0) gradients.empty().arrive();
                });
            gradients.advance();
        }
    }

    // Computes and adds one piece of 64 rows x 64 channels. Calls release() when the product is complete.
    template <class Release>
    __device__ __forceinline__ void add_piece(uint32_t ds, float* sums, int piece, int warp, int lane,
                                              const Release& release) const {
        constexpr int kRowPieces = kBlockM / 64;
        const int row_piece = piece % kRowPieces, col_piece = piece / kRowPieces;
        float dq[32];
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step)
            Wgmma<T, 64>::template multiply_shared<true, true>(
                dq, ScoreTile::down_rows(ds + row_piece * ScoreTile::kChunkBytes, step),
                KvTile::down_rows(k_smem() + col_piece * KvTile::kChunkBytes, step), step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_settle(dq);
        release();
        float* const mine = sums + (piece * 4 + warp) * Accumulator::kWarpFloats;
#pragma unroll
        for (int n = 0; n < 8; ++n) WarpQuad::add(mine + n * 128, lane, {dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]});
    }
};

}  // namespace libflash::cuda::sm90
