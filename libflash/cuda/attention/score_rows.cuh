// The memory of a bias or of a boolean mask, and loads of single numbers of it, whatever its strides.
#pragma once

#include "cuda/attention/params.h"

namespace libflash::cuda {

// A bias or a mask of one head, from a key on. Number: its type; uint8_t for a mask.
template <class Number>
struct ScoreRows {
    const Number* first;  // row 0 of the sequence, the first key
    int64_t row_stride, key_stride;
    int rows, keys;  // rows from row 0 on; keys from the first key on

    __device__ __forceinline__ ScoreRows(const ScoreParams& tensor, const void* of_head, int first_key, int length_q,
                                         int length_k)
        : first(static_cast<const Number*>(of_head) + first_key * tensor.stride[3]), row_stride(tensor.stride[2]),
          key_stride(tensor.stride[3]), rows(length_q), keys(length_k - first_key) {}

    // Whether `count` keys of each row can be loaded with aligned loads of `bytes` bytes: these keys exist and are contiguous.
    __device__ __forceinline__ bool loads(int count, int bytes) const {
        const int64_t places = reinterpret_cast<int64_t>(first) | row_stride * static_cast<int64_t>(sizeof(Number));
        return key_stride == 1 && keys >= count && (places & (bytes - 1)) == 0;
    }

    // The functions below call rule(i, number) for the elements i of a lane whose row and key exist.
    //
    // In the layout of tile/accumulator.cuh: columns are keys. `row`: the lane's first row.
    template <int kKeys, class Rule>
    __device__ __forceinline__ void for_elements(int row, int lane, const Rule& rule) const {
        const int key = (lane & 3) * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Number* of_row = first + (row + 8 * r) * row_stride + key * key_stride;
            const int left = row + 8 * r < rows ? keys - key : 0;
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e < left) rule(4 * n + 2 * r + e, of_row[e * key_stride]);
                of_row += 8 * key_stride;
            }
        }
    }
    // The same for transposed scores. `row`: the first query row of the scores, not of the lane.
    template <int kRows, class Rule>
    __device__ __forceinline__ void for_transposed_elements(int row, int lane, const Rule& rule) const {
        // One pointer at a time, because there are few registers.
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int first_row = row + (lane & 3) * 2 + e, key = 8 * k + (lane >> 2);
                const int left = key < keys ? rows - first_row : 0;
                const Number* at = first + first_row * row_stride + key * key_stride;
#pragma unroll
                for (int n = 0; n < kRows / 8; ++n, at += 8 * row_stride)
                    if (8 * n < left) rule(4 * n + 2 * k + e, *at);
            }
    }
};

}  // namespace libflash::cuda
