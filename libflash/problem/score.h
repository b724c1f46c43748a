// Tensors that act on the scores: bias and mask, one number for each (batch, head, row, column); slopes and sinks, one a head.
#pragma once

#include "problem/attention.h"
#include "problem/read.h"

namespace libflash {

// How large a bias or mask must be. A packed side has no single size: it must cover at least the largest length, as far as known.
struct ScoreSizes {
    int64_t batch = 0, heads = 0;
    int64_t rows = 0, cols = 0;
    bool rows_at_least = false, cols_at_least = false;
};

// Device, and each dimension full or 1.
ScoreTensor build_score_tensor(const TensorView& view, const Argument& argument, const ScoreSizes& sizes, const Device& device);

// On the CPU, in a call: do rows and columns cover the largest lengths that occur?
void check_score_covers(const ScoreTensor& tensor, const Argument& argument, int64_t rows, int64_t cols);

// (heads) or, where `batch` may have its own numbers, (batch, heads). FLOAT32 or the type of q.
HeadTensor build_slopes(const TensorView& view, int64_t batch, int64_t heads, DType dtype, const Device& device);
HeadTensor build_head_vector(const TensorView& view, const Argument& argument, int64_t heads, DType dtype, const Device& device);

}  // namespace libflash
