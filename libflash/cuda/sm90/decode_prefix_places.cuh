// Where the units of keys of a tile are in the cache, for the warps that load them in the sm_90a kernel for keys that sequences
// share.
#pragma once

#include "cuda/sm90/decode_prefix_storage.cuh"

namespace libflash::cuda::sm90 {

// Of a unit: its page (or entry), and the row in it of the unit's first key. `page` may also be hidden() or absent(), which are
// outside the cache, so that zeros are loaded.
struct PrefixPlace {
    int page, row;

    static __device__ __forceinline__ int hidden(const CacheParams& cache) { return cache.pages; }      // no row sees its keys
    static __device__ __forceinline__ int absent(const CacheParams& cache) { return cache.pages + 1; }  // there is no such page

    // `key`: the unit's first key. A page that no row sees is not read.
    static __device__ __forceinline__ PrefixPlace read(const CacheParams& cache, const PrefixWorkTile& work_tile,
                                                       const KeyLocations& locations, int key) {
        if (key + kDecodeSlab <= work_tile.first || key >= work_tile.last) return {hidden(cache), 0};
        const KeyLocation at = locations.of(key);
        return {static_cast<uint32_t>(at.page) < static_cast<uint32_t>(cache.pages) ? at.page : absent(cache), at.row};
    }
    // The place that lane `from` has read.
    __device__ __forceinline__ PrefixPlace of_lane(int from) const {
        return {__shfl_sync(0xffffffffu, page, from), __shfl_sync(0xffffffffu, row, from)};
    }
};

}  // namespace libflash::cuda::sm90
