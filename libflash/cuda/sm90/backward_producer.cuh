// The producer of the sm_90a backward kernel: one thread finds work tiles and loads K, V, Q, dO and softmax statistics by TMA.
// With a fixed order two other threads add the sums of the dQ warpgroup to the dQ accumulator.
#pragma once

#include "cuda/sm90/backward_fixed_order.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"
#include "cuda/sm90/backward_tile_scheduler.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardProducer {
    using KvTile = typename Traits::KvTile;
    using QTile = typename Traits::QTile;
    using Tiles = BackwardSharedTiles<Traits>;
    using Queries = PipelineState<Traits::kStages>;

    BackwardContext<Traits>& context;
    const BackwardQueryTiles<Traits> query_tiles{context};
    const BackwardTileScheduler<Traits> scheduler{context};

    __device__ __forceinline__ void run() const {
        const int warp = Traits::kFixedOrder ? uniform_warp() : static_cast<int>(threadIdx.x / 32);
        if (warp > (Traits::kFixedOrder ? 2 : 0)) return;
        const bool leader = elect_one();
        if (warp == 0) {
            if (leader || Traits::kRagged) load_work_tiles(leader);  // with packed sequences the whole warp finds the work tile
        } else if constexpr (Traits::kFixedOrder) {
            if (leader) BackwardFixedOrder<Traits>{context}.run(warp - 1);
        }
    }

private:
    __device__ __forceinline__ void load_work_tiles(bool leader) const {
        const auto& storage = context.storage;
        Queries queries(context.storage.queries);
        int number = scheduler.first();
#pragma unroll 1
        while (true) {
            storage.tile_empty(context.slot()).wait(context.phase() ^ 1);
            const bool exists = scheduler.find(number);
            if (leader) storage.tile_full(context.slot()).arrive();
            if (!exists) return;
            if (leader) load_work_tile(queries);
            if constexpr (Traits::kRagged) __syncwarp();
            ++context.passed;
            number = scheduler.next(number);
        }
    }
    // Where K and V have only one stage, the first query tiles are loaded before K and V, because the previous work tile still
    // uses that stage.
    __device__ __forceinline__ void load_work_tile(Queries& queries) const {
        int before_keys = Traits::kKeyStages == 1 ? Traits::kStages - 1 : 0;
#pragma unroll 1
        for (auto at = query_tiles.first(); at.left > 0; query_tiles.advance(at)) {
            if (before_keys-- == 0) load_keys();
            queries.wait_empty();
            load_queries(queries, at);
            queries.advance();
        }
        if (before_keys >= 0) load_keys();
        if constexpr (Traits::kDividesProducts) leave_stage(queries);
    }
    // Leaves a stage free, through which dK and dV are written (backward_keys.cuh, backward_values.cuh).
    __device__ __forceinline__ void leave_stage(Queries& queries) const {
        queries.wait_empty();
        queries.full().arrive();
        queries.advance();
    }

    __device__ __forceinline__ void load_queries(const Queries& queries, const QueryTilePosition& at) const {
        const auto& tile = context.tile();
        const MBarrier full = queries.full();
        const int row = at.tile * Traits::kBlockM, row_in_tensor = tile.query_row(at.tile);
        full.arrive_and_expect(2 * QTile::kBytes + Tiles::kStatisticsBytes);
        QTile::load(context.tiles.q(queries.stage), context.maps.q, full, row_in_tensor, at.head, tile.work.batch);
        tma_load_bytes(shared_address(context.tiles.statistics(queries.stage)),
                       context.params.softmax_statistics + tile.first_unit(context.params, at) * kUnitRows + row,
                       Tiles::kStatisticsBytes, full);
        QTile::load(context.tiles.dout(queries.stage), context.maps.dout, full, row_in_tensor, at.head, tile.work.batch);
    }
    __device__ __forceinline__ void load_keys() const {
        const auto& storage = context.storage;
        const int stage = context.key_stage();
        load_keys(context.k(), context.maps.k, storage.k_full(stage), storage.k_empty(stage));
        load_keys(context.v(), context.maps.v, storage.v_full(stage), storage.v_empty(stage));
    }
    __device__ __forceinline__ void load_keys(uint32_t to, const CUtensorMap& map, MBarrier full, MBarrier empty) const {
        const auto& tile = context.tile();
        empty.wait(context.key_phase() ^ 1);
        full.arrive_and_expect(KvTile::kBytes);
        KvTile::load(to, map, full, tile.key_row(), tile.work.head, tile.work.batch);
    }
};

}  // namespace libflash::cuda::sm90
