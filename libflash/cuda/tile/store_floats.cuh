// Stores a row of float accumulators to global memory. The four lanes that share the row write 32 contiguous bytes, a whole
// memory sector, so staging in shared memory would gain nothing.
#pragma once

#include "cuda/ptx/math.cuh"

#include <type_traits>

namespace libflash::cuda {

// Writes x(n, e) to column 8 * n + e for n below kBlocks and e = 0, 1. `row` points to the lane's first column, 2 * (lane % 4);
// `cols` columns exist from there on. `vectors`: rows are 16-byte aligned and cols is a multiple of 4.
template <int kBlocks, class Values>
__device__ __forceinline__ void store_floats(float* row, int cols, bool vectors, const Values& x) {
    if (vectors) {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
            if (n * 8 < cols) *reinterpret_cast<float2*>(row + n * 8) = make_float2(x(n, 0), x(n, 1));
    } else {
#pragma unroll
        for (int i = 0; i < kBlocks * 2; ++i)
            if (i / 2 * 8 + i % 2 < cols) row[i / 2 * 8 + i % 2] = x(i / 2, i % 2);
    }
}

// Replaces old values by x + weight * old; if weight is 0, by x, even if the old value is NaN. Otherwise as store_floats(), for
// rows of floats or, without `vectors`, of 16-bit values. The whole warp calls it; with cols <= 0 it stores nothing. The barriers
// keep the compiler from loading more old values at once than there are registers for.
template <int kBlocks, class Out, class Values>
__device__ __forceinline__ void store_sums(Out* row, int cols, bool vectors, float weight, const Values& x) {
    if (std::is_same<Out, float>::value && vectors) {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
            if (n % 8 == 0 && n > 0) __syncwarp();
            if (n * 8 >= cols) continue;
            float2* const at = reinterpret_cast<float2*>(row + n * 8);
            float2 sum = make_float2(x(n, 0), x(n, 1));
            if (weight != 0.0f) {
                const float2 old = *at;
                sum = make_float2(fmaf(weight, old.x, sum.x), fmaf(weight, old.y, sum.y));
            }
            *at = sum;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kBlocks * 2; ++i) {
            const int col = i / 2 * 8 + i % 2;
            if (i % 16 == 0 && i > 0) __syncwarp();
            if (col >= cols) continue;
            float sum = x(i / 2, i % 2);
            if (weight != 0.0f) sum = fmaf(weight, to_float(row[col]), sum);
            row[col] = from_float(sum, Out());
        }
    }
}

}  // namespace libflash::cuda
