// Warp-wide matrix products of doubles, c += A B, with rounding to nearest: m8n8k4 (sm_80), and m16n8k8 and m16n8k16, which are
// single instructions from sm_90 on and several m8n8k4 before.
//
// For lane = 4 * g + t:
//   m8n8k4    c[0..1]: (row g, cols 2t and 2t + 1)    a: (row g, k t)    b: (k t, col g)
//   m16n8k..  c0 to c3: (row g, cols 2t and 2t + 1), (row g + 8, the same cols)
//             a[2i], a[2i + 1]: (row g, k t + 4i), (row g + 8, k t + 4i)    b[i]: (k t + 4i, col g)
// so a larger product is several m8n8k4 of neighbouring registers.
#pragma once

namespace libflash::cuda {

__device__ __forceinline__ void mma_m8n8k4(double (&c)[2], double a, double b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(c[0]), "+d"(c[1])
                 : "d"(a), "d"(b));
}

// The product over 4 * kSteps columns of A, as products over four columns.
template <int kSteps>
__device__ __forceinline__ void mma_m16n8_in_parts(double& c0, double& c1, double& c2, double& c3, const double (&a)[2 * kSteps],
                                                   const double (&b)[kSteps]) {
    const auto multiply = [](double& x, double& y, double left, double right) {
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+d"(x), "+d"(y)
                     : "d"(left), "d"(right));
    };
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        multiply(c0, c1, a[2 * i], b[i]);
        multiply(c2, c3, a[2 * i + 1], b[i]);
    }
}

__device__ __forceinline__ void mma_m16n8(double& c0, double& c1, double& c2, double& c3, const double (&a)[4],
                                          const double (&b)[2]) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
    mma_m16n8_in_parts<2>(c0, c1, c2, c3, a, b);
#endif
}

__device__ __forceinline__ void mma_m16n8(double& c0, double& c1, double& c2, double& c3, const double (&a)[8],
                                          const double (&b)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]), "d"(b[2]),
          "d"(b[3]));
#else
    mma_m16n8_in_parts<4>(c0, c1, c2, c3, a, b);
#endif
}

}  // namespace libflash::cuda
