// For each query tile of each query head and each of its turns (backward_turns.h), a counter of the key tiles that have yet to add
// to its dQ accumulator.
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/sm90/backward_turns.h"

namespace libflash::cuda::sm90 {

// The counter of the first turn; those of the other turns follow.
template <int kBlockM, int kTurns>
__device__ __forceinline__ int* dq_counters(const BackwardParams& params, int64_t first_unit, int tile) {
    return params.dq_counters + (first_unit * (kUnitRows / kBlockM) + tile) * kTurns;
}

// The kernel of the softmax statistics sets the counters of the tiles of one unit.
template <class Kernel>
struct BackwardDqCounters {
    static constexpr int kBlockM = Kernel::config.tile_q, kBlockN = Kernel::config.tile_k, kTurns = dq_turns(Kernel::config);

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
        int* const counters = dq_counters<kBlockM, kTurns>(params, first_unit, tile);
        for (int turn = 0; turn < kTurns; ++turn) counters[turn] = range.end - range.begin;
    }
};

}  // namespace libflash::cuda::sm90
