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

// A thread block sets the counters of one unit of query rows, a thread for each.
template <class Kernel>
struct BackwardDqCounters {
    static constexpr int kBlockM = Kernel::config.tile_q, kBlockN = Kernel::config.tile_k, kThreads = 32;
    static_assert(kUnitRows / kBlockM <= kThreads, "a thread for each query tile");

    __device__ static __forceinline__ void set(const BackwardParams& params) {
        const TileCoordinates work = tile_coordinates<kUnitRows>(params.query_schedule, params.q_lengths, params.batch);
        if (work.batch < 0) return;
        const SequenceRows rows = SequenceRows::of(params.q_lengths, work.batch);
        const int tile = work.tile * (kUnitRows / kBlockM) + static_cast<int>(threadIdx.x);
        if (threadIdx.x >= kUnitRows / kBlockM || tile * kBlockM >= rows.owned) return;
        // Contains a key tile if and only if QueryTiles of that key tile contains the query tile.
        KeyRange<kBlockM, kBlockN> range;
        range.init(params.mask, tile, rows.length, SequenceRows::of(params.k_lengths, work.batch).length);
        const int64_t first_unit = QueryUnits::first(params, work.batch, work.head, rows.start);
        *dq_counter<kBlockM>(params, first_unit, tile) = range.end - range.begin;
    }
};

}  // namespace libflash::cuda::sm90
