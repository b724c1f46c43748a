// The producer warps of the sm_90a backward kernels for wide heads: one loads the rows, the streamed tensor and the statistics,
// the other loads the added tensor, so that neither waits until a part of the other tensor is released.
#pragma once

#include "cuda/sm90/backward_wide_storage.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardWideProducer {
    using Tile = typename Traits::Tile;

    const BackwardWideContext<Traits>& context;

    __device__ __forceinline__ void run() const {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (warp > 1 || work_tile().number_of_tiles == 0 || !elect_one()) return;
        if (warp == 0) {
            load_rows();
            load_streamed();
        } else {
            load_added();
        }
    }

private:
    __device__ __forceinline__ const BackwardWideWorkTile<Traits>& work_tile() const { return context.storage.work_tile; }
    // The row in the columns' tensors at which a tile begins.
    __device__ __forceinline__ int first_column(int tile) const { return work_tile().columns.start + tile * 64; }

    __device__ __forceinline__ void load_rows() const {
        const int chunks = score_chunks(context.params);
        const int second = Traits::kDifferences ? streamed_chunks<Traits>(context.params) : 0;
        context.storage.full_of_rows().arrive_and_expect((chunks + second) * Tile::kChunkBytes);
        load_rows(context.tiles.rows, context.maps.rows, chunks);
        if constexpr (Traits::kDifferences) load_rows(context.tiles.rows_of_streamed(), context.maps.second_rows, second);
    }
    __device__ __forceinline__ void load_rows(uint32_t to, const CUtensorMap& map, int chunks) const {
        const auto& work = work_tile();
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk)
            tma_load(to + chunk * Tile::kChunkBytes, map, context.storage.full_of_rows(), chunk * 64,
                     work.rows.start + work.first_row(), work.at.head, work.at.batch);
    }

    __device__ __forceinline__ void load_streamed() const {
        const auto& work = work_tile();
        const int chunks = streamed_chunks<Traits>(context.params);
        int head = work.first_head, tile = work.tiles.begin, stage = 0;
        uint32_t phase = 1;
#pragma unroll 1
        for (int number = 0; number < work.number_of_tiles; ++number, work.advance(head, tile, 1)) {
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; ++chunk) {
                context.storage.empty_of_streamed(stage).wait(phase);
                const MBarrier full = context.storage.full_of_streamed(number % Traits::kGroups, stage);
                full.arrive_and_expect(Tile::kChunkBytes);
                tma_load(context.tiles.streamed(stage), context.maps.streamed, full, chunk * 64, first_column(tile), head,
                         work.at.batch);
                if (++stage == Traits::kStreamStages) stage = 0, phase ^= 1;
            }
            if constexpr (Traits::kKeys) load_statistics(number, head, tile);
        }
    }
    // Loads the statistics of the queries of a tile.
    __device__ __forceinline__ void load_statistics(int number, int head, int tile) const {
        const auto& work = work_tile();
        const int group = number % Traits::kGroups;
        auto& statistics = context.storage.statistics[group];
        context.storage.empty_of_statistics(group).wait((static_cast<uint32_t>(number / Traits::kGroups) & 1) ^ 1);
        const MBarrier full = context.storage.full_of_statistics(group);
        full.arrive_and_expect(sizeof(statistics));
        const int64_t unit = QueryUnits::first(context.params, head, work.units_before);
        tma_load_bytes(shared_address(&statistics), context.params.softmax_statistics + unit * kUnitRows + tile * 64,
                       sizeof(statistics), full);
    }

    // Loads the added tensor. Channels that the call does not have become zeros.
    __device__ __forceinline__ void load_added() const {
        const auto& work = work_tile();
        int head = work.first_head, tile = work.tiles.begin;
#pragma unroll 1
        for (int number = 0; number < work.number_of_tiles; ++number, work.advance(head, tile, 1)) {
#pragma unroll 1
            for (int n = 0; n < Traits::kChunks; ++n) {
                const int chunk = added_chunk<Traits>(n);
                context.storage.empty_of_added(chunk / Traits::kPieceChunks).wait((static_cast<uint32_t>(number) & 1) ^ 1);
                const MBarrier full = context.storage.full_of_added(chunk);
                full.arrive_and_expect(Tile::kChunkBytes);
                tma_load(context.tiles.added() + chunk * Tile::kChunkBytes, context.maps.added, full, chunk * 64,
                         first_column(tile), head, work.at.batch);
            }
        }
    }
};

}  // namespace libflash::cuda::sm90
