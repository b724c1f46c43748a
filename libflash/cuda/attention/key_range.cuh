// The range of key tiles that a query tile sees by sequence lengths, causal mask and window.
#pragma once

#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"

namespace libflash::cuda {

template <int kBlockM, int kBlockN>
struct KeyRange {
    int first_row;  // of the query tile
    int shift;      // column of the diagonal in row 0
    int length_k;
    int left, right;
    int begin, end;  // key tiles [begin, end)

    __device__ __forceinline__ void init(const MaskParams& mask, int tile, int queries, int keys) {
        first_row = tile * kBlockM;
        length_k = keys;
        shift = mask.top_left ? 0 : keys - queries;
        left = mask.left;
        right = mask.right;
        const int last_row = min(first_row + kBlockM, queries) - 1;
        const int first_col = max(0, first_row + shift - left);
        const int last_col = min(keys, last_row + shift + right + 1);
        begin = first_col / kBlockN;
        end = last_row < first_row || last_col <= first_col ? begin : (last_col + kBlockN - 1) / kBlockN;
    }

    // The keys that some row of the query tile sees; `queries`: query rows of the sequence.
    __device__ __forceinline__ VisibleRange seen_by_tile(int queries) const {
        const int last_row = min(first_row + kBlockM, queries) - 1;
        return {max(0, first_row + shift - left), min(length_k, last_row + shift + right + 1)};
    }

    // Keys from `existing` on are absent.
    __device__ __forceinline__ void end_at(int existing) {
        length_k = existing;
        end = max(begin, min(end, (existing + kBlockN - 1) / kBlockN));
    }

    // Keeps at most one key tile.
    __device__ __forceinline__ void keep_tile(int tile) {
        begin = max(begin, tile);
        end = min(end, tile + 1);
    }

    // For a shard with positions: replaces all members except first_row and length_k. of_first, of_last: the keys that the first
    // and the last row of the tile see. is_edge() then tests whether a key tile lies within the keys that both rows see.
    __device__ __forceinline__ void set_ranges(int2 of_first, int2 of_last) {
        shift = 0;
        right = of_first.y - 1 - first_row;
        left = first_row + kBlockM - 1 - of_last.x;
        begin = of_first.x / kBlockN;
        end = of_last.y <= of_first.x ? begin : (of_last.y + kBlockN - 1) / kBlockN;
    }

    // Whether any score of the query tile and this key tile is masked by these rules.
    __device__ __forceinline__ bool is_edge(int tile) const {
        const int first_col = tile * kBlockN, last_col = first_col + kBlockN - 1;
        const int first = first_row + shift;
        return last_col >= length_k || last_col > first + right || first_col < first + kBlockM - 1 - left;
    }
};

}  // namespace libflash::cuda
