// The elements of a thread's accumulators, for loops that need their positions. An accumulator consists of blocks of 16 rows and
// 8 columns, both in mma.sync and in wgmma. Element e of a block in lane 4 * g + t:
//
//   row g + 8 * (e / 2)    column 2 * t + e % 2
//
// So a lane has two rows, g + 8 * r with r = 0 or 1, which four lanes share, and two neighbouring columns of every 8. In an array
// with all elements of these two rows, block by block, element 4 * n + 2 * r + e (e = 0 or 1) has row g + 8 * r and column
// 8 * n + 2 * t + e. Scores have a row for each query and a column for each key; transposed scores have a row for each key and a
// column for each query.
//
// Rows and columns of the functions below are relative to the lane's first row and column.
//
// The order of the elements matters: the compiler keeps this order, and the number of registers depends on it.
#pragma once

namespace libflash::cuda {

// Row by row: calls for_row(a, r, for_columns) for row 16 * a + 8 * r of the lane; for_columns(rule) calls rule(element, column)
// for the elements of that row.
template <int kSlabs, int kBlocks, class ForRow>
__device__ __forceinline__ void for_accumulator_rows(float (&c)[kSlabs][kBlocks][4], const ForRow& for_row) {
#pragma unroll
    for (int a = 0; a < kSlabs; ++a)
#pragma unroll
        for (int r = 0; r < 2; ++r)
            for_row(a, r, [&](const auto& rule) {
#pragma unroll
                for (int n = 0; n < kBlocks; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) rule(c[a][n][2 * r + e], n * 8 + e);
            });
}
// As above, for an accumulator of wgmma, whose elements are numbered 4 * block + e.
template <int kElements, class ForRow>
__device__ __forceinline__ void for_accumulator_rows(float (&c)[kElements], const ForRow& for_row) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
        for_row(0, r, [&](const auto& rule) {
#pragma unroll
            for (int i = 2 * r; i < kElements; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e) rule(c[i + e], i / 4 * 8 + e);
        });
}

}  // namespace libflash::cuda
