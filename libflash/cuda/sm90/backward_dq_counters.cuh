// For each query tile of each query head, a counter of the key tiles that have yet to add to its dQ accumulator. Not with block
// masks: there a last kernel converts all.
#pragma once

#include "cuda/attention/element.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/attention/query_tiles.cuh"

namespace libflash::cuda::sm90 {

template <int kBlockM>
__device__ __forceinline__ int* dq_counter(const BackwardParams& params, int64_t first_unit, int tile) {
    return params.dq_counters + first_unit * (kUnitRows / kBlockM) + tile;
}

// What the kernel of the softmax statistics does for the tiles of one unit: sets their counters, and writes zeros to dq where
// no key tile adds.
template <class Kernel>
struct BackwardDqCounters {
    using T = ElementOf<Kernel::config.dtype>;
    static constexpr int kBlockM = Kernel::config.tile_q, kBlockN = Kernel::config.tile_k;

    const BackwardParams& params;
    const TileCoordinates& work;  // tile: a unit
    const SequenceRows& rows;

    template <int kThreads>
    __device__ __forceinline__ void set() const {
        const int64_t first_unit = QueryUnits::first(params, work.batch, work.head, rows.start);
        const int keys = SequenceRows::of(params.k_lengths, work.batch).length;
#pragma unroll 1
        for (int i = 0; i < kUnitRows / kBlockM; ++i) {
            const int tile = work.tile * (kUnitRows / kBlockM) + i;
            if (tile * kBlockM >= rows.owned) return;
            // Contains a key tile if and only if QueryTiles of that key tile contains the query tile.
            KeyRange<kBlockM, kBlockN> range;
            range.init(params.mask, tile, rows.length, keys);
            const int count = range.end - range.begin;
            if (threadIdx.x == 0) *dq_counter<kBlockM>(params, first_unit, tile) = count;
            if (count == 0) write_zeros<kThreads>(tile);
        }
    }

private:
    template <int kThreads>
    __device__ __forceinline__ void write_zeros(int tile) const {
        T* const first = static_cast<T*>(params.dq.data) + work.batch * params.dq.batch + work.head * params.dq.head +
                         int64_t{rows.start + tile * kBlockM} * params.dq.row;
        const int count = min(kBlockM, rows.owned - tile * kBlockM), columns = params.head_dim;
        for (int i = threadIdx.x; i < count * columns; i += kThreads) first[i / columns * params.dq.row + i % columns] = T(0.0f);
    }
};

}  // namespace libflash::cuda::sm90
