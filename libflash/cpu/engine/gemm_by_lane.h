// Products of floats with the instructions of Arm that multiply a vector by one lane of another: one load gives four elements of
// A, which gemm.h loads one by one. The order of the sums is that of gemm.h, so the bits are the same. Included by gemm.h.
#pragma once

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// sum[m][n] += x[m] * row[n], where x[m] is lane kLane of a[m].
template <int kLane, int M, int NV>
FLASH_INLINE void add_products_of_lane(const F32 (&a)[M], const float* b, F32 (&sum)[M][NV]) {
    FLASH_UNROLL
    for (int n = 0; n < NV; ++n) {
        const F32 row = load(b + n * 4);
        FLASH_UNROLL
        for (int m = 0; m < M; ++m) sum[m][n] = vfmaq_laneq_f32(sum[m][n], row, a[m], kLane);
    }
}

// Rows of A are contiguous: four steps of the sum from one vector of each row.
template <int M, int NV>
FLASH_INLINE const float* add_products_of_rows(const Product<float>& p, const float* a, const float* b, F32 (&sum)[M][NV]) {
    const int64_t a_m = p.a_m, b_k = p.b_k;
    for (int64_t k = p.k / 4; k > 0; --k, a += 4, b += 4 * b_k) {
        F32 x[M];
        FLASH_UNROLL
        for (int m = 0; m < M; ++m) x[m] = load(a + m * a_m);
        add_products_of_lane<0>(x, b, sum);
        add_products_of_lane<1>(x, b + b_k, sum);
        add_products_of_lane<2>(x, b + 2 * b_k, sum);
        add_products_of_lane<3>(x, b + 3 * b_k, sum);
    }
    return a;
}

// sum[first + m][n] += A(first + m, k) * row[n] for the four elements of x.
template <int kFirst, int M, int NV>
FLASH_INLINE void add_products_of_four(F32 x, const F32 (&row)[NV], F32 (&sum)[M][NV]) {
    FLASH_UNROLL
    for (int n = 0; n < NV; ++n) {
        sum[kFirst][n] = vfmaq_laneq_f32(sum[kFirst][n], row[n], x, 0);
        sum[kFirst + 1][n] = vfmaq_laneq_f32(sum[kFirst + 1][n], row[n], x, 1);
        sum[kFirst + 2][n] = vfmaq_laneq_f32(sum[kFirst + 2][n], row[n], x, 2);
        sum[kFirst + 3][n] = vfmaq_laneq_f32(sum[kFirst + 3][n], row[n], x, 3);
    }
}

// One step of the sum where columns of A are contiguous.
template <int M, int NV>
FLASH_INLINE void add_products_of_column(const float* a, const float* b, F32 (&sum)[M][NV]) {
    F32 row[NV];
    FLASH_UNROLL
    for (int n = 0; n < NV; ++n) row[n] = load(b + n * 4);
    if constexpr (M >= 4) add_products_of_four<0>(load(a), row, sum);
    if constexpr (M >= 8) add_products_of_four<4>(load(a + 4), row, sum);
    constexpr int done = M / 4 * 4, pairs = M % 4 / 2 * 2;
    if constexpr (pairs > 0) {
        const float32x2_t x = vld1_f32(a + done);
        FLASH_UNROLL
        for (int n = 0; n < NV; ++n) {
            sum[done][n] = vfmaq_lane_f32(sum[done][n], row[n], x, 0);
            sum[done + 1][n] = vfmaq_lane_f32(sum[done + 1][n], row[n], x, 1);
        }
    }
    if constexpr (M % 2 == 1) {
        FLASH_UNROLL
        for (int n = 0; n < NV; ++n) sum[M - 1][n] = vfmaq_n_f32(sum[M - 1][n], row[n], a[M - 1]);
    }
}

template <int M, int NV>
FLASH_INLINE void add_products(const Product<float>& p, const float* a, const float* b, F32 (&sum)[M][NV]) {
    int64_t k = p.k;
    if (p.a_m == 1) {
        for (; k > 0; --k, a += p.a_k, b += p.b_k) add_products_of_column(a, b, sum);
        return;
    }
    if (p.a_k == 1) {
        a = add_products_of_rows(p, a, b, sum);
        b += k / 4 * 4 * p.b_k, k %= 4;
    }
    add_products_one_by_one(p, k, a, b, sum);
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
