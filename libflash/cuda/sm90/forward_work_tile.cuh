// A work tile of the sm_90a forward kernel: one query tile of one head, with all data that the warps need to compute it.
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/sm90/forward_sequences.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

struct Empty {};

// The factors of the scores (to base-2 units) and of the values of a work tile, with the scales of the cache, but not those of
// rows.
struct CacheFactors {
    float scores, values;

    __device__ __forceinline__ static CacheFactors of(const PrefillParams& params, int batch, int kv_head) {
        return {params.scale_log2 * scale(params.k_scale, batch, kv_head), scale(params.v_scale, batch, kv_head)};
    }

private:
    __device__ __forceinline__ static float scale(const CacheScaleParams& scales, int batch, int kv_head) {
        return scales.data && !scales.of_rows ? scales.data[batch * scales.batch + kv_head * scales.head] : 1.0f;
    }
};

// What the tile scheduler assigns to a thread block.
struct TileAssignment {
    TileCoordinates coordinates;
    int index;         // static schedule: which work tile of the thread block; dynamic: its unit (sequence_order.cuh)
    uint32_t writers;  // a bit per consumer warp: whether it writes; in recomputation only warps with overflowed rows write
};

// The key tiles [begin, end) that a consumer warpgroup processes. Its rows see all keys of the tiles [unmasked_begin,
// unmasked_end); the others are edge tiles.
struct alignas(16) GroupKeyTiles {
    int begin, end, unmasked_begin, unmasked_end;
};

template <class Traits>
struct ForwardWorkTile {
    static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kGroupRows = Traits::kGroupRows;

    TileAssignment assignment;
    SequenceRows q_rows;
    int first_key;  // first row of its sequence in K and V
    float* lse;     // of the first row; nullptr: not requested
    KeyRange<kBlockM, kBlockN> keys;
    GroupKeyTiles of_group[Traits::kGroups];  // computed once from `keys`, read for every key tile
    std::conditional_t<Traits::kRareOptions, ScoreRules<typename Traits::T>, Empty> rules;
    std::conditional_t<Traits::kCopied, CacheFactors, Empty> factors;
    int kv_head;
    bool exact_maximum;  // take the maximum of every tile: in recomputation

    using Params = typename Traits::Params;

    __device__ __forceinline__ void init(const Params& params, const TileAssignment& assigned, bool exact) {
        const TileCoordinates& work = assigned.coordinates;
        const ForwardKeys k_rows = keys_of(params, work.batch);
        assignment = assigned;
        exact_maximum = exact;
        q_rows = query_rows_of(params, work.batch);
        first_key = k_rows.start;
        kv_head = work.head / params.group_size;
        keys.init(params.mask, work.tile, q_rows.length, k_rows.length);
        if constexpr (Traits::kCache) keys.end_at(k_rows.existing);
        const RowStatisticsParams& rows = params.lse;
        lse = rows.data ? rows.data + work.batch * rows.batch + work.head * rows.head + (q_rows.start + keys.first_row) * rows.row
                        : nullptr;
#pragma unroll
        for (int group = 0; group < Traits::kGroups; ++group) of_group[group] = key_tiles_of_group(params, group);
        if constexpr (Traits::kRareOptions) rules.init(params.rare, work.batch, work.head, k_rows.length - q_rows.length);
        if constexpr (Traits::kCopied) {
            factors = CacheFactors::of(params, work.batch, kv_head);
            exact_maximum |= !(factors.scores > 0.0f);  // the largest dot product would not be the largest score
        }
    }
    // A work tile without keys, which marks the end of a pass over all work tiles.
    __device__ __forceinline__ void init_end(bool exact) {
        keys.begin = keys.end = 0;
        for (GroupKeyTiles& tiles : of_group) tiles.begin = tiles.end = 0;
        exact_maximum = exact;
    }

    __device__ __forceinline__ bool has_keys() const { return keys.begin != keys.end; }
    __device__ __forceinline__ int batch() const { return assignment.coordinates.batch; }
    __device__ __forceinline__ int head() const { return assignment.coordinates.head; }

    // The factor of the dot products.
    __device__ __forceinline__ float scale_log2(const Params& params) const {
        if constexpr (Traits::kCopied) return factors.scores;
        return params.scale_log2;
    }
    // Rows of the sequence: first row, number of rows, used length. In the plain instance they are the same for all sequences.
    __device__ __forceinline__ int start_q() const { return Traits::kDynamic ? q_rows.start : 0; }
    __device__ __forceinline__ int owned_q(const Params& params) const {
        return Traits::kDynamic ? q_rows.owned : params.q_lengths.capacity;
    }
    __device__ __forceinline__ int length_q(const Params& params) const {
        return Traits::kDynamic ? q_rows.length : params.q_lengths.capacity;
    }
    // The first row of a tile in K and V.
    __device__ __forceinline__ int key_row(int tile) const { return (Traits::kDynamic ? first_key : 0) + tile * kBlockN; }

private:
    // Skips key tiles at the end that no row of the group sees, so that groups with fewer keys or without rows take less time.
    // One tile always remains. At most kStages - 1 are skipped: the group releases their stages of V only when K of its first
    // tile has arrived, and the producer loads V of the skipped tiles before that K. In a work tile with more key tiles, a group
    // without rows gets no tile at all; then it does not overlap its previous and its next work tile.
    __device__ __forceinline__ GroupKeyTiles key_tiles_of_group(const Params& params, int group) const {
        constexpr int kStages = Traits::kStages;
        const int first = keys.first_row + group * kGroupRows, diagonal = first + keys.shift,
                  rows = min(length_q(params) - first, kGroupRows);
        const int seen = rows <= 0 ? 0 : max(diagonal + rows + keys.right, 0);  // end of the keys that some row sees
        GroupKeyTiles tiles{keys.begin, min((seen + kBlockN - 1) / kBlockN, keys.end)};
        tiles.end = min(max(max(tiles.end, keys.begin + 1), keys.end - (kStages - 1)), keys.end);
        if (Traits::kSkipsWorkTiles && first >= owned_q(params) && keys.end - keys.begin > kStages) tiles.end = keys.begin;
        tiles.unmasked_begin = (max(diagonal + kGroupRows - 1 - keys.left, 0) + kBlockN - 1) / kBlockN;
        tiles.unmasked_end = max(min(keys.length_k, diagonal + keys.right + 1), 0) / kBlockN;
        return tiles;
    }
};

}  // namespace libflash::cuda::sm90
