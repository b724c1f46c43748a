// The producer of the sm_90a kernel for keys that sequences share: a warp for each 64 channels loads K from the cache by TMA, and
// each of the four warps copies a unit of V (decode_prefix_copies.cuh), because these warps do not issue the TMA loads of K and V
// as fast as the consumers need them. A stage of K is released after the scores, a stage of V after the products with P.
#pragma once

#include "cuda/sm90/decode_prefix_copies.cuh"
#include "cuda/sm90/decode_prefix_places.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodePrefixProducer {
    using KTile = typename Traits::KTile;
    using Copies = DecodePrefixCopies<Traits>;
    static constexpr int kUnit = Traits::kUnit, kUnits = Traits::kUnits, kTilesAtOnce = 32 / kUnits;
    static_assert(kUnits == Traits::kProducerWarps, "a warp for each unit of V");

    const DecodePrefixContext<Traits>& context;

    struct Keys {
        PrefixPlace own, next;  // of all units of the current kTilesAtOnce tiles, and of the next ones
        PipelineState<Traits::kStages> k;
    };

    __device__ __forceinline__ void run() const {
        const int warp = uniform_warp(), tiles = context.storage.work_tile.tiles;
        const bool loads_keys = warp < KTile::kChunks;
        const KeyLocations locations(context.params.cache, context.storage.work_tile.sequence);
        Keys keys{{}, loads_keys ? read(locations, 0) : PrefixPlace{}, PipelineState<Traits::kStages>(context.storage.k)};
        const Copies copies{context};
        typename Copies::State values = copies.begin(locations, warp);
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            if (loads_keys) load_keys(keys, locations, tile, warp);
            copies.step(values, locations, tile);
        }
        copies.finish(values, tiles);
    }

private:
    __device__ __forceinline__ void load_keys(Keys& keys, const KeyLocations& locations, int tile, int chunk) const {
        if (tile % kTilesAtOnce == 0) keys.own = keys.next, keys.next = read(locations, tile + kTilesAtOnce);
        PrefixPlace at[kUnits];
        uint32_t absent_units = 0;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            at[unit] = keys.own.of_lane(tile % kTilesAtOnce * kUnits + unit);
            if (at[unit].page == PrefixPlace::absent(context.params.cache)) absent_units |= 1u << unit;
        }
        if (elect_one()) {
            const int head = context.storage.work_tile.head_k;
            const uint32_t to = context.tiles.k(keys.k.stage) + chunk * KTile::kChunkBytes;
            keys.k.wait_empty();
            if (chunk == 0) context.storage.absent[keys.k.stage] = absent_units;
            keys.k.full().arrive_and_expect(KTile::kChunkBytes);
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit)
                tma_load(to + unit * kUnit * 128, context.maps.k, keys.k.full(), chunk * KTile::kChunkCols, at[unit].row, head,
                         at[unit].page);
        }
        __syncwarp();
        keys.k.advance();
    }
    // Each lane reads the place of one unit of the tiles from `tile` on.
    __device__ __forceinline__ PrefixPlace read(const KeyLocations& locations, int tile) const {
        const int lane = static_cast<int>(threadIdx.x % 32);
        const PrefixWorkTile& work_tile = context.storage.work_tile;
        const int key = work_tile.key_of(tile + lane / kUnits, Traits::kBlockN, lane % kUnits * kUnit);
        return PrefixPlace::read(context.params.cache, work_tile, locations, key);
    }
};

}  // namespace libflash::cuda::sm90
