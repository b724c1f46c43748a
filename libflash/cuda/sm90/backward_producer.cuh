// The producer of the sm_90a backward kernel: one thread loads K, V, Q, dO and softmax statistics by TMA. Under a fixed order two
// others add what the dQ warpgroup has computed.
#pragma once

#include "cuda/sm90/backward_fixed_order.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardProducer {
    using KvTile = typename Traits::KvTile;
    using QTile = typename Traits::QTile;
    using Tiles = BackwardSharedTiles<Traits>;

    const BackwardContext<Traits>& context;
    const BackwardQueryTiles<Traits> query_tiles{context};

    __device__ __forceinline__ void run() const {
        const int warp = Traits::kFixedOrder ? uniform_warp() : static_cast<int>(threadIdx.x / 32);
        if (warp > (Traits::kFixedOrder ? 2 : 0) || !elect_one()) return;
        if (warp == 0) {
            load_tiles();
        } else if constexpr (Traits::kFixedOrder) {
            BackwardFixedOrder<Traits>{context}.add_tiles(warp - 1);
        }
    }

private:
    __device__ __forceinline__ void load_tiles() const {
        load_keys();
        PipelineState<Traits::kStages> queries(context.storage.queries);
#pragma unroll 1
        for (auto at = query_tiles.first(); at.left > 0; query_tiles.advance(at)) {
            queries.wait_empty();
            load_queries(queries, at);
            queries.advance();
        }
    }

    __device__ __forceinline__ void load_queries(const PipelineState<Traits::kStages>& queries,
                                                 const QueryTilePosition& at) const {
        const auto& storage = context.storage;
        const MBarrier full = queries.full();
        const int row = at.tile * Traits::kBlockM, row_in_tensor = storage.query_row(at.tile);
        full.arrive_and_expect(2 * QTile::kBytes + Tiles::kStatisticsBytes);
        QTile::load(context.tiles.q(queries.stage), context.maps.q, full, row_in_tensor, at.head, storage.work.batch);
        tma_load_bytes(shared_address(context.tiles.statistics(queries.stage)),
                       context.params.softmax_statistics + storage.first_unit(context.params, at) * kUnitRows + row,
                       Tiles::kStatisticsBytes, full);
        QTile::load(context.tiles.dout(queries.stage), context.maps.dout, full, row_in_tensor, at.head, storage.work.batch);
    }
    __device__ __forceinline__ void load_keys() const {
        const auto& storage = context.storage;
        const MBarrier full = storage.keys();
        full.arrive_and_expect(2 * KvTile::kBytes);
        KvTile::load(context.tiles.k(), context.maps.k, full, storage.key_row(), storage.work.head, storage.work.batch);
        KvTile::load(context.tiles.v(), context.maps.v, full, storage.key_row(), storage.work.head, storage.work.batch);
    }
};

}  // namespace libflash::cuda::sm90
