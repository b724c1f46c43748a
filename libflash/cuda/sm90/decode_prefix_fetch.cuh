// What the idle warps of the producer warpgroup do in the sm_90a kernel for keys that sequences share: they prefetch into L2 the
// first keys after the shared ones, with which the attention kernel goes on. Memory is idle meanwhile, because many thread blocks
// read the shared keys from L2.
#pragma once

#include "cuda/ptx/prefetch.cuh"
#include "cuda/sm90/decode_prefix_storage.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodePrefixFetch {
    using T = typename Traits::T;
    static constexpr int kWarps = 3, kMostUnits = 2;  // of each sequence and class
    static constexpr int kLine = 128 / sizeof(T), kUnit = Traits::kUnit;

    const DecodePrefixContext<Traits>& context;

    // `warp`: of kWarps.
    __device__ __forceinline__ void run(int warp) const {
        const DecodeParams& params = context.params;
        const int tile_keys = context.storage.work_tile.classes * kUnit;
#pragma unroll 1
        for (int row = warp; row < Traits::rows(); row += kWarps) {
            const PrefixRow own = context.storage.rows[row];
            if (own.batch < 0 || own.packed > 0) continue;  // one row of each sequence
            const VisibleKeys range(params, KeyCount::of(params.cache, own.batch), 0, params.seqlen_q - 1,
                                    context.storage.work_tile.split, tile_keys);
            const int shared = end_of_prefix(params, range, context.storage.work_tile.shared_keys, tile_keys);
            fetch(own.batch, max(shared, range.first), range.last);
        }
    }

private:
    // Units of the class. A lane has one key and either K or V.
    __device__ __forceinline__ void fetch(int batch, int first, int last) const {
        const PrefixWorkTile& work_tile = context.storage.work_tile;
        const CacheParams& cache = context.params.cache;
        const KeyLocations locations(cache, batch);
        const int lane = static_cast<int>(threadIdx.x % 32), tile_keys = work_tile.classes * kUnit;
        const bool of_keys = lane < kUnit;
        const RowsParams& rows = of_keys ? cache.k : cache.v;
        const int channels = of_keys ? context.params.head_dim : context.params.head_dim_v;
        int key = first / tile_keys * tile_keys + work_tile.of_class * kUnit + lane % kUnit;
#pragma unroll 1
        for (int unit = 0; unit < kMostUnits; ++unit, key += tile_keys) {
            if (key < first || key >= last) continue;
            const KeyLocation at = locations.of(key);
            if (static_cast<uint32_t>(at.page) >= static_cast<uint32_t>(cache.pages)) continue;
            const T* const from =
                static_cast<const T*>(rows.data) + at.page * rows.batch + at.row * rows.row + work_tile.head_k * rows.head;
#pragma unroll
            for (int channel = 0; channel < Traits::kHeadDim; channel += kLine)
                if (channel < channels) prefetch_to_l2(from + channel);
        }
    }
};

}  // namespace libflash::cuda::sm90
