// The producer of the sm_90a backward kernel, one thread of the dQ warpgroup: loads K, V, Q, dO and softmax statistics by TMA.
#pragma once

#include "cuda/sm90/backward_query_tiles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardProducer {
    using KvTile = typename Traits::KvTile;
    using QTile = typename Traits::QTile;
    using Tiles = BackwardSharedTiles<Traits>;

    const BackwardContext<Traits>& context;
    const BackwardQueryTiles<Traits> query_tiles{context};

    // Loads K and V, and fills all stages of query tiles but one.
    __device__ __forceinline__ void begin() const {
        load_keys();
        context.storage.loads = {query_tiles.first(), 0, 0};
#pragma unroll 1
        for (int i = 0; i < Traits::kStages - 1; ++i) load_queries();
    }
    // Loads the next query tile.
    __device__ __forceinline__ void load_queries() const {
        auto& storage = context.storage;
        auto& next = storage.loads;
        if (next.at.left <= 0) return;
        PipelineState<Traits::kStages> queries(storage.queries, next.stage, next.phase);
        queries.wait_empty();
        const MBarrier full = queries.full();
        const int row = next.at.tile * Traits::kBlockM, row_in_tensor = storage.query_row(next.at.tile);
        full.arrive_and_expect(2 * QTile::kBytes + Tiles::kStatisticsBytes);
        QTile::load(context.tiles.q(queries.stage), context.maps.q, full, row_in_tensor, next.at.head, storage.work.batch);
        tma_load_bytes(shared_address(context.tiles.statistics(queries.stage)),
                       context.params.softmax_statistics + storage.first_unit(context.params, next.at) * kUnitRows + row,
                       Tiles::kStatisticsBytes, full);
        QTile::load(context.tiles.dout(queries.stage), context.maps.dout, full, row_in_tensor, next.at.head, storage.work.batch);
        queries.advance();
        next.stage = queries.stage;
        next.phase = queries.phase;
        query_tiles.advance(next.at);
    }

private:
    __device__ __forceinline__ void load_keys() const {
        const auto& storage = context.storage;
        const MBarrier full = storage.keys();
        full.arrive_and_expect(2 * KvTile::kBytes);
        KvTile::load(context.tiles.k(), context.maps.k, full, storage.key_row(), storage.work.head, storage.work.batch);
        KvTile::load(context.tiles.v(), context.maps.v, full, storage.key_row(), storage.work.head, storage.work.batch);
    }
};

}  // namespace libflash::cuda::sm90
