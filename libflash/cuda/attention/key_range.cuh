// The range of key tiles that a query tile sees by sequence lengths, causal mask and window.
#pragma once

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

    // Whether any score of the query tile and this key tile is masked by these rules.
    __device__ __forceinline__ bool is_edge(int tile) const {
        const int first_col = tile * kBlockN, last_col = first_col + kBlockN - 1;
        const int first = first_row + shift;
        return last_col >= length_k || last_col > first + right || first_col < first + kBlockM - 1 - left;
    }
};

}  // namespace libflash::cuda
