// The producer warps of the sm_90a forward kernel for wide heads: one loads Q and the chunks of K, one the pieces of V, so that
// neither waits for a part of the other tensor to be released.
#pragma once

#include "cuda/sm90/forward_wide_storage.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardWideProducer {
    using QTile = typename Traits::QTile;
    using KTile = typename Traits::KTile;
    using VTile = typename Traits::VTile;

    const ForwardWideContext<Traits>& context;

    __device__ __forceinline__ void run() const {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (warp > 1 || work_tile().tiles() == 0 || !elect_one()) return;
        warp == 0 ? load_queries_and_keys() : load_values();
    }

private:
    __device__ __forceinline__ const ForwardWideWorkTile<Traits>& work_tile() const { return context.storage.work_tile; }
    __device__ __forceinline__ int key_row(int number) const { return work_tile().first_key + work_tile().first_key_of(number); }

    __device__ __forceinline__ void load_queries_and_keys() const {
        const ForwardWideWorkTile<Traits>& work = work_tile();
        const int chunks = used_chunks<Traits>(context.params), tiles = work.tiles(),
                  row = work.q_rows.start + work.keys.first_row;
        const MBarrier q_full = context.storage.full_of_q();
        q_full.arrive_and_expect(chunks * QTile::kChunkBytes);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk)
            tma_load(context.tiles.q + chunk * QTile::kChunkBytes, context.maps.q, q_full, chunk * QTile::kChunkCols, row,
                     work.at.head, work.at.batch);
#pragma unroll 1
        for (int number = 0; number < tiles; ++number) {
            const int key = key_row(number);
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; ++chunk) {
                context.storage.empty_of_k(chunk).wait((static_cast<uint32_t>(number) & 1) ^ 1);
                const MBarrier full = context.storage.full_of_k(number % Traits::kGroups, chunk);
                full.arrive_and_expect(KTile::kChunkBytes);
                tma_load(context.tiles.k() + chunk * KTile::kChunkBytes, context.maps.k, full, chunk * KTile::kChunkCols, key,
                         work.kv_head, work.at.batch);
            }
        }
    }

    // Loads the first pieces of both warpgroups before the second pieces. Channels that the call does not have become zeros.
    __device__ __forceinline__ void load_values() const {
        const ForwardWideWorkTile<Traits>& work = work_tile();
        const int tiles = work.tiles();
#pragma unroll 1
        for (int number = 0; number < tiles; ++number) {
            const int key = key_row(number);
#pragma unroll 1
            for (int n = 0; n < Traits::kAllPieces; ++n) {
                const int piece = n % Traits::kGroups * Traits::kPieces + n / Traits::kGroups;
                context.storage.empty_of_v(piece).wait((static_cast<uint32_t>(number) & 1) ^ 1);
                const MBarrier full = context.storage.full_of_v(piece);
                full.arrive_and_expect(Traits::kPieceBytes);
#pragma unroll
                for (int i = 0; i < Traits::kPieceChunks; ++i) {
                    const int chunk = piece * Traits::kPieceChunks + i;
                    tma_load(context.tiles.v() + chunk * VTile::kChunkBytes, context.maps.v, full, chunk * VTile::kChunkCols, key,
                             work.kv_head, work.at.batch);
                }
            }
        }
    }
};

}  // namespace libflash::cuda::sm90
