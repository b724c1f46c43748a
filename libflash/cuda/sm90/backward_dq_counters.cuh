// For each query tile of each query head, a counter of the key tiles that have yet to add to its dQ accumulator: the turns of
// deterministic=True (backward_fixed_order.cuh).
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/query_tiles.cuh"

namespace libflash::cuda::sm90 {

template <int kBlockM>
__device__ __forceinline__ int* dq_counter(const BackwardParams& params, int64_t first_unit, int tile) {
    return params.dq_counters + first_unit * (kUnitRows / kBlockM) + tile;
}

// The kernel of the softmax statistics sets the counters of the tiles of one unit.
template <class Kernel>
struct BackwardDqCounters {
    static constexpr int kBlockM = Kernel::config.tile_q, kBlockN = Kernel::config.tile_k;

    const BackwardParams& params;
    const TileCoordinates& work;  // tile: a unit
    const SequenceRows& rows;

    __device__ __forceinline__ void set() const {
        const int i = threadIdx.x, tile = work.tile * (kUnitRows / kBlockM) + i;
        if (i >= kUnitRows / kBlockM || tile * kBlockM >= rows.owned) return;
        const int64_t first_unit = QueryUnits::first(params, work.batch, work.head, rows.start);
        const int keys = SequenceRows::of(params.k_lengths, work.batch).length;
        // Contains a key tile if and only if QueryTiles of that key tile contains the query tile.
        KeyRange<kBlockM, kBlockN> range;
        range.init(params.mask, tile, rows.length, keys);
        *dq_counter<kBlockM>(params, first_unit, tile) = range.end - range.begin;
    }
};

}  // namespace libflash::cuda::sm90
