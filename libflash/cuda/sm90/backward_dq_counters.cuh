// Counters for deterministic=True (backward_fixed_order.cuh): for each query tile of each query head, which key tile adds to the
// dQ accumulator next. Key tiles add in the order of their work tiles: descending, or ascending (only the plain instance). Only
// dense block masks are supported: with lists whose entries do not ascend, the turn could belong to a key tile that never adds
// (capabilities.cpp).
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/query_units.cuh"

namespace libflash::cuda::sm90 {

template <int kBlockM>
__device__ __forceinline__ int* dq_counter(const BackwardParams& params, int64_t first_unit, int tile) {
    return params.dq_counters + first_unit * (kUnitRows / kBlockM) + tile;
}

// The turns of the key tiles at a query tile. Without a block mask the key tiles are consecutive, and the counter is the number
// of key tiles that have yet to add. Under a block mask they are not consecutive, and the counter is the number of the key tile
// whose turn it is, or -1.
template <int kBlockM, int kBlockN, bool kBlockMask>
struct DqTurns {
    const BlockMaskParams& blocks;  // by column: the block mask that QueryTiles uses
    int batch, head, tile;          // of the query tile
    bool descending;
    // Contains a key tile if and only if QueryTiles of that key tile contains the query tile.
    KeyRange<kBlockM, kBlockN> range;

    __device__ __forceinline__ DqTurns(const BackwardParams& params, int in_batch, int in_head, int query_tile, int queries,
                                       int keys)
        : blocks(params.block_cols), batch(in_batch), head(in_head), tile(query_tile), descending(params.key_schedule.reversed) {
        range.init(params.mask, tile, queries, keys);
    }
    __device__ __forceinline__ int first() const { return kBlockMask ? last_below(range.end) : range.end - range.begin; }
    __device__ __forceinline__ int of(int key_tile) const {
        if (kBlockMask) return key_tile;
        return descending ? key_tile - range.begin + 1 : range.end - key_tile;
    }
    __device__ __forceinline__ int after(int turn) const { return kBlockMask ? last_below(turn) : turn - 1; }

private:
    __device__ __forceinline__ int last_below(int key_tile) const {
#pragma unroll 1
        while (--key_tile >= range.begin)
            if (keeps(key_tile)) return key_tile;
        return -1;
    }
    // Whether QueryTiles::next of the key tile stops at the query tile.
    __device__ __forceinline__ bool keeps(int key_tile) const {
        return !blocks.mask ||
               blocks.mask[batch * blocks.mask_stride[0] + head * blocks.mask_stride[1] +
                           tile * kBlockM / 128 * blocks.mask_stride[2] + key_tile * kBlockN / 128 * blocks.mask_stride[3]];
    }
};

// Whether sequences have more tiles than their schedule has work tiles (query_units.cuh). All lanes of a warp call it.
template <int kTileRows>
__device__ __forceinline__ bool exceed(const ScheduleParams& schedule, const LengthsParams& lengths, int batch_count) {
    if (!lengths.cu) return false;
    int tiles = 0;
#pragma unroll 1
    for (int batch = static_cast<int>(threadIdx.x % 32); batch < batch_count; batch += 32)
        tiles = min(tiles + packed_tiles<kTileRows>(lengths, batch), schedule.tiles + 1);
    return __reduce_add_sync(0xffffffffu, tiles) > schedule.tiles;
}

// A thread block sets the counters of one unit of query rows, a thread for each. Where sequences have more tiles than work tiles,
// a turn could belong to a key tile that nobody computes, or a counter would not be set. Then no work tile is left for dK/dV.
template <class Kernel, bool kBlockMask>
struct BackwardDqCounters {
    static constexpr int kBlockM = Kernel::config.tile_q, kBlockN = Kernel::config.tile_k, kThreads = 32;
    static constexpr int kNoWorkTileLeft = 1 << 30;  // above all numbers; thread blocks can still add to it
    static_assert(kUnitRows / kBlockM <= kThreads, "a thread for each query tile");

    __device__ static __forceinline__ void set(const BackwardParams& params) {
        const int index = static_cast<int>(blockIdx.x);
        if (index == 0 && (exceed<kUnitRows>(params.query_schedule, params.q_lengths, params.batch) ||
                           exceed<kBlockN>(params.key_schedule, params.k_lengths, params.batch)))
            *params.next_work_tile = kNoWorkTileLeft;
        const TileCoordinates work = tile_coordinates<kUnitRows>(params.query_schedule, params.q_lengths, params.batch, index);
        if (work.batch < 0) return;
        const SequenceRows rows = SequenceRows::of(params.q_lengths, work.batch);
        const int tile = work.tile * (kUnitRows / kBlockM) + static_cast<int>(threadIdx.x);
        if (threadIdx.x >= kUnitRows / kBlockM || tile * kBlockM >= rows.owned) return;
        const int keys = SequenceRows::of(params.k_lengths, work.batch).length;
        const DqTurns<kBlockM, kBlockN, kBlockMask> turns(params, work.batch, work.head, tile, rows.length, keys);
        const int64_t first_unit = QueryUnits::of(params, params.query_schedule, index, work) - work.tile;
        *dq_counter<kBlockM>(params, first_unit, tile) = turns.first();
    }
};

}  // namespace libflash::cuda::sm90
