// Float accumulators of a row from registers to global memory. The four lanes that share the row write 32 bytes of it together, which is what
// memory takes at a time: no detour through shared memory.
#pragma once

namespace libflash::cuda {

// Columns 8 * n + e of `row` from x[n][e], for n below kBlocks and e = 0, 1; of the row there are `cols` from there on. `row` points at the
// lane's first column, 2 * (lane % 4) further. `vectors`: rows are 16-byte aligned, and cols a multiple of 4.
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

}  // namespace libflash::cuda
