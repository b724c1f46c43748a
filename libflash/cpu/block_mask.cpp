// Converts a dense block mask to lists: the kept columns of each block row, the kept rows of each block column. Entries past a
// count are set to 0, so that equal masks give equal bytes.
#include "cpu/kernels.h"

namespace libflash::cpu {
namespace {

// `step`: distance of neighbouring entries of the line (a row or column of the mask).
int32_t list_line(const uint8_t* line, int64_t step, int64_t n, int32_t* indices) {
    int32_t count = 0;
    for (int64_t at = 0; at < n; ++at)
        if (line[at * step]) indices[count++] = static_cast<int32_t>(at);
    for (int64_t at = count; at < n; ++at) indices[at] = 0;
    return count;
}

}  // namespace

void compress_block_mask(const uint8_t* mask, int64_t matrices, int64_t rows, int64_t cols, int32_t* row_counts,
                         int32_t* row_indices, int32_t* col_counts, int32_t* col_indices) {
    for (int64_t m = 0; m < matrices; ++m) {
        const uint8_t* matrix = mask + m * rows * cols;
        for (int64_t r = 0; row_counts && r < rows; ++r)
            row_counts[m * rows + r] = list_line(matrix + r * cols, 1, cols, row_indices + (m * rows + r) * cols);
        for (int64_t c = 0; col_counts && c < cols; ++c)
            col_counts[m * cols + c] = list_line(matrix + c, cols, rows, col_indices + (m * cols + c) * rows);
    }
}

}  // namespace libflash::cpu
