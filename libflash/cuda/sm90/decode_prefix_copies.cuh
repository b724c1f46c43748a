// How the producer warps of the sm_90a kernel for keys that sequences share load V: each copies one unit of every tile by
// cp.async.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm90/decode_prefix_places.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodePrefixCopies {
    using T = typename Traits::T;
    using VTile = typename Traits::VTile;
    using Pipeline = PipelineState<Traits::kStages>;
    static constexpr int kLag = Traits::kStages / 2;  // tiles in flight while a warp waits for the tile before them
    // The lanes copy 16 bytes each, of kRowsAtOnce rows.
    static constexpr int kVectors = Traits::kHeadDim / 8, kRowsAtOnce = 32 / kVectors;

    const DecodePrefixContext<Traits>& context;

    struct State {
        int unit, lane;
        PrefixPlace own, next;  // of the unit in the current 32 tiles (one per lane), and in the next 32 tiles
        Pipeline copied, arrived;
    };

    __device__ __forceinline__ State begin(const KeyLocations& locations, int unit) const {
        const int lane = static_cast<int>(threadIdx.x % 32);
        const Pipeline v(context.storage.v);
        return {unit, lane, {}, read(locations, unit, lane), v, v};
    }
    // Begins to copy a tile, and waits for the tile kLag before it.
    __device__ __forceinline__ void step(State& c, const KeyLocations& locations, int tile) const {
        if (tile % 32 == 0) c.own = c.next, c.next = read(locations, c.unit, tile + 32 + c.lane);
        const PrefixPlace place = c.own.of_lane(tile % 32);
        c.copied.wait_empty();
        copy(context.tiles.v(c.copied.stage), place, c);
        c.copied.advance();
        cp_async_commit();
        if (tile >= kLag) wait_and_announce<kLag>(c, 1);
    }
    // Waits for the last of `tiles` tiles.
    __device__ __forceinline__ void finish(State& c, int tiles) const { wait_and_announce<0>(c, min(tiles, kLag)); }

private:
    template <int kPending>
    __device__ __forceinline__ void wait_and_announce(State& c, int count) const {
        cp_async_wait<kPending>();
        fence_shared_for_async();
        __syncwarp();
        for (int i = 0; i < count; ++i, c.arrived.advance())
            if (arrives_for_warp(c.lane)) c.arrived.full().arrive();
    }
    __device__ __forceinline__ PrefixPlace read(const KeyLocations& locations, int unit, int tile) const {
        const PrefixWorkTile& work_tile = context.storage.work_tile;
        const int key = work_tile.key_of(tile, Traits::kBlockN, unit * Traits::kUnit);
        return PrefixPlace::read(context.params.cache, work_tile, locations, key);
    }
    __device__ __forceinline__ void copy(uint32_t tile, const PrefixPlace& place, const State& c) const {
        const RowsParams& rows = context.params.cache.v;
        const int row = c.lane / kVectors, vector = c.lane % kVectors;
        const bool exists = place.page < context.params.cache.pages && vector * 8 < context.params.head_dim_v;
        const T* const from = static_cast<const T*>(rows.data) + (exists ? place.page : 0) * rows.batch +
                              (place.row + row) * rows.row + context.storage.work_tile.head_k * rows.head + vector * 8;
#pragma unroll
        for (int i = 0; i < Traits::kUnit; i += kRowsAtOnce)
            cp_async_16(tile + VTile::offset(c.unit * Traits::kUnit + i + row, vector), from + i * rows.row, exists);
    }
};

}  // namespace libflash::cuda::sm90
