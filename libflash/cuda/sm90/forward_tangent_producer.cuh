// The producer warp of the sm_90a forward_tangent kernel: finds work tiles, and loads Q, K, V and their tangents by TMA.
#pragma once

#include "cuda/sm90/forward_tangent_storage.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardTangentProducer {
    using Storage = ForwardTangentStorage<Traits>;
    using WorkTile = ForwardTangentWorkTile<Traits>;
    using QTile = typename Traits::QTile;
    using KeysTile = typename Traits::KeysTile;
    using VTile = typename Traits::VTile;
    static constexpr int kBlockN = Traits::kBlockN, kStages = Traits::kStages;

    const ForwardTangentContext<Traits>& context;

    struct State {
        PipelineState<kStages> keys, v;
        PipelineState<1> q;
    };

    __device__ __forceinline__ void run() const {
        if (threadIdx.x >= 32) return;
        const bool leader = elect_one();
        State p{PipelineState<kStages>(context.storage.keys), PipelineState<kStages>(context.storage.v),
                PipelineState<1>(context.storage.q)};
        ForwardTangentSchedule<Traits> schedule;
        int slot = 0;
        bool more = true;
#pragma unroll 1
        while (more) {
            const TileCoordinates work = schedule.find(context.params);
            more = work.batch >= 0;
            if (leader) {
                WorkTile& work_tile = context.storage.work_tiles[slot];
                work_tile.init(context.params, work);
                load_work_tile(p, work_tile);
            }
            __syncwarp();
            slot = Storage::next_slot(slot);
        }
    }

private:
    // Announces a work tile to the consumers, which wait for Q, and loads its tiles from the last key tile to the first: V of a
    // tile after K of the next.
    __device__ __forceinline__ void load_work_tile(State& p, const WorkTile& work_tile) const {
        const bool loads = !work_tile.is_end() && work_tile.has_keys();
        if (loads) load_keys(p, work_tile, work_tile.keys.end - 1);
        load_queries(p, work_tile, loads);
        if (!loads) return;
#pragma unroll 1
        for (int tile = work_tile.keys.end - 2; tile >= work_tile.keys.begin; --tile) {
            load_keys(p, work_tile, tile);
            load_values(p, work_tile, tile + 1);
        }
        load_values(p, work_tile, work_tile.keys.begin);
    }

    __device__ __forceinline__ void load_queries(State& p, const WorkTile& work_tile, bool loads) const {
        const bool has_tangent = context.params.tq.data;
        p.q.wait_empty();
        if (loads) {
            p.q.full().arrive_and_expect(Traits::kGroups * QTile::kBytes * (has_tangent ? 2 : 1));
            for (int group = 0; group < Traits::kGroups; ++group) {
                const int row = work_tile.q_rows.start + work_tile.keys.first_row + group * Traits::kGroupRows;
                QTile::load(context.tiles.q(group), context.maps.q, p.q.full(), row, work_tile.at.head, work_tile.at.batch);
                if (has_tangent)
                    QTile::load(context.tiles.tq(group), context.maps.tq, p.q.full(), row, work_tile.at.head, work_tile.at.batch);
            }
        } else {
            p.q.full().arrive();
        }
        p.q.advance();
    }
    // K and tK, whose chunks alternate.
    __device__ __forceinline__ void load_keys(State& p, const WorkTile& work_tile, int tile) const {
        constexpr int kHalfChunk = KeysTile::kChunkBytes / 2;
        const bool has_tangent = context.params.tk.data;
        p.keys.wait_empty();
        p.keys.full().arrive_and_expect(has_tangent ? KeysTile::kBytes : KeysTile::kBytes / 2);
        const uint32_t keys = context.tiles.keys(p.keys.stage);
        const int row = work_tile.key_row(tile);
        const auto load = [&](uint32_t at, const CUtensorMap& map) {
#pragma unroll
            for (int chunk = 0; chunk < KeysTile::kChunks; ++chunk)
                tma_load(at + chunk * KeysTile::kChunkBytes, map, p.keys.full(), chunk * KeysTile::kChunkCols, row,
                         work_tile.kv_head, work_tile.at.batch);
        };
        load(keys, context.maps.k);
        if (has_tangent) load(keys + kHalfChunk, context.maps.tk);
        p.keys.advance();
    }
    __device__ __forceinline__ void load_values(State& p, const WorkTile& work_tile, int tile) const {
        const bool has_tangent = context.params.tv.data;
        p.v.wait_empty();
        p.v.full().arrive_and_expect(VTile::kBytes * (has_tangent ? 2 : 1));
        const int row = work_tile.key_row(tile);
        VTile::load(context.tiles.v(p.v.stage), context.maps.v, p.v.full(), row, work_tile.kv_head, work_tile.at.batch);
        if (has_tangent)
            VTile::load(context.tiles.tv(p.v.stage), context.maps.tv, p.v.full(), row, work_tile.kv_head, work_tile.at.batch);
        p.v.advance();
    }
};

}  // namespace libflash::cuda::sm90
