// The warp-wide matrix product of doubles (sm_80): m8n8k4, c += A B, with rounding to nearest.
//
// For lane = 4 * g + t:  c[0..1]: (row g, cols 2t and 2t + 1)    a: (row g, k t)    b: (k t, col g)
#pragma once

namespace libflash::cuda {

__device__ __forceinline__ void mma_m8n8k4(double (&c)[2], double a, double b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(c[0]), "+d"(c[1])
                 : "d"(a), "d"(b));
}

}  // namespace libflash::cuda
