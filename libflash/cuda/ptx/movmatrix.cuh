// Transposes 8x8 matrices of 16-bit numbers between the lanes of a warp.
#pragma once

#include <cstdint>

namespace libflash::cuda {

// Lane 4 * g + t gives numbers 2t and 2t + 1 of row g, and gets numbers g of rows 2t and 2t + 1.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

}  // namespace libflash::cuda
