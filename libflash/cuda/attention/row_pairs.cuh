// Rows of a tensor in the layout of an accumulator.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/ptx/math.cuh"

#include <type_traits>

namespace libflash::cuda {

// The elements of one row of a tensor that a lane has in an accumulator: columns first + 8 * n + 2 * (lane % 4) and the next
// column.
template <class T>
struct RowPairs {
    const T* row;  // from the lane's first column on; nullptr: zeros
    int cols;      // from there on
    bool vectors;  // pairs are aligned, and whole

    __device__ static __forceinline__ RowPairs of(const RowsParams& rows, const TileCoordinates& work, int row, int channels,
                                                  bool vectors, int lane, int first = 0) {
        const T* data = static_cast<const T*>(rows.data);
        const int col = first + lane % 4 * 2;
        if (data) data += work.batch * rows.batch + work.head * rows.head + row * rows.row + col;
        return {data, channels - col, vectors};
    }

    __device__ __forceinline__ float2 at(int n) const {
        if (!row || n * 8 >= cols) return make_float2(0.0f, 0.0f);
        const T* at = row + n * 8;
        if constexpr (std::is_same<T, float>::value) {
            if (vectors) return *reinterpret_cast<const float2*>(at);
        } else if (vectors) {
            const uint32_t pair = *reinterpret_cast<const uint32_t*>(at);
            return make_float2(low_of(pair, T()), high_of(pair, T()));
        }
        return make_float2(to_float(at[0]), n * 8 + 1 < cols ? to_float(at[1]) : 0.0f);
    }
};

}  // namespace libflash::cuda
