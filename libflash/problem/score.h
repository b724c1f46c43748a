// Checks of the tensors that change the scores: bias and mask (batch, head, row, column), slopes and sinks (head).
#pragma once

#include "problem/attention.h"
#include "problem/read.h"

namespace libflash {

// The size that bias and mask must have. With *_at_least, for a packed side, they may be larger: they must cover every length.
struct ScoreSizes {
    int64_t batch = 0, heads = 0;
    int64_t rows = 0, cols = 0;
    bool rows_at_least = false, cols_at_least = false;
};

// Checks the device, and that each dimension has full size or size 1.
ScoreTensor build_score_tensor(const TensorView& view, const Argument& argument, const ScoreSizes& sizes, const Device& device);

// For packed calls on the CPU: checks that the tensor covers `rows` and `cols`, the largest lengths.
void check_score_covers(const ScoreTensor& tensor, const Argument& argument, int64_t rows, int64_t cols);

// Shape (heads), for slopes also (batch, heads). FLOAT32 or the type of q.
HeadTensor build_slopes(const TensorView& view, int64_t batch, int64_t heads, DType dtype, const Device& device);
HeadTensor build_head_vector(const TensorView& view, const Argument& argument, int64_t heads, DType dtype, const Device& device);

}  // namespace libflash
