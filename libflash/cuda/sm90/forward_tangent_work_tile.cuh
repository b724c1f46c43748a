// A work tile of the sm_90a forward_tangent kernel: one query tile of one head, and the order in which a thread block computes
// them.
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/tangent_params.h"
#include "cuda/sm90/forward_work_tile.cuh"
#include "cuda/sm90/static_schedule.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardTangentWorkTile {
    static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kGroupRows = Traits::kGroupRows;

    TileCoordinates at;  // batch < 0: the end mark
    SequenceRows q_rows;
    int first_key;  // first row of its sequence in K and V
    int kv_head;
    KeyRange<kBlockM, kBlockN> keys;
    GroupKeyTiles of_group[Traits::kGroups];

    __device__ __forceinline__ void init(const ForwardTangentParams& params, const TileCoordinates& work) {
        at = work;
        if (work.batch < 0) return;
        const SequenceRows k_rows = SequenceRows::of(params.k_lengths, work.batch);
        q_rows = SequenceRows::of(params.q_lengths, work.batch);
        first_key = k_rows.start;
        kv_head = work.head / params.group_size;
        keys.init(params.mask, work.tile, q_rows.length, k_rows.length);
#pragma unroll
        for (int group = 0; group < Traits::kGroups; ++group) of_group[group] = key_tiles_of_group(group);
    }
    __device__ __forceinline__ bool is_end() const { return at.batch < 0; }
    __device__ __forceinline__ bool has_keys() const { return keys.begin != keys.end; }
    // The first row of a tile in K and V.
    __device__ __forceinline__ int key_row(int tile) const { return first_key + tile * kBlockN; }

private:
    // The tiles that some row of the group sees, and those that all its rows see in full.
    __device__ __forceinline__ GroupKeyTiles key_tiles_of_group(int group) const {
        const int first = keys.first_row + group * kGroupRows, diagonal = first + keys.shift;
        const int rows = min(q_rows.length - first, kGroupRows);
        const int seen_begin = max(diagonal - keys.left, 0),
                  seen_end = rows <= 0 ? 0 : max(min(keys.length_k, diagonal + rows + keys.right), 0);
        GroupKeyTiles tiles;
        tiles.begin = min(max(seen_begin / kBlockN, keys.begin), keys.end);
        tiles.end = max(min((seen_end + kBlockN - 1) / kBlockN, keys.end), tiles.begin);
        tiles.unmasked_begin = (max(diagonal + kGroupRows - 1 - keys.left, 0) + kBlockN - 1) / kBlockN;
        tiles.unmasked_end = max(min(keys.length_k, diagonal + keys.right + 1), 0) / kBlockN;
        return tiles;
    }
};

// The static schedule: a thread block takes every n-th work tile. Where only the device knows lengths, there is a thread block
// for each work tile, and the GPU starts one when another one ends.
template <class Traits>
struct ForwardTangentSchedule {
    int next = 0;

    // Finds the next work tile with rows; batch < 0: none is left. A whole warp calls it; all lanes get the same.
    __device__ __forceinline__ TileCoordinates find(const ForwardTangentParams& params) {
        const StaticSchedule<Traits::kBlockM, true> schedule{params.schedule, params.q_lengths, params.batch};
        while (next < params.schedule.fixed.most_tiles) {
            const TileCoordinates work = schedule.tile(next++);
            if (work.batch >= 0 && work.tile * Traits::kBlockM < SequenceRows::of(params.q_lengths, work.batch).owned)
                return work;
        }
        return {-1, 0, 0};
    }
};

}  // namespace libflash::cuda::sm90
