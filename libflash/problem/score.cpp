#include "problem/score.h"

namespace libflash {

namespace {

constexpr const char* kScoreAxes[4] = {"batch", "heads_q", "seqlen_q", "seqlen_k"};

bool fits(int64_t size, int64_t full, bool at_least) { return size == 1 || (at_least ? size >= full : size == full); }

}  // namespace

ScoreTensor build_score_tensor(const TensorView& view, const Argument& argument, const ScoreSizes& sizes, const Device& device) {
    check_device(view, argument, device);
    const int64_t full[4] = {sizes.batch, sizes.heads, sizes.rows, sizes.cols};
    const bool at_least[4] = {false, false, sizes.rows_at_least, sizes.cols_at_least};
    ScoreTensor tensor;
    tensor.present = true;
    tensor.data = view.data;
    tensor.dtype = view.dtype;
    const int missing = 4 - view.ndim;
    for (int i = missing; i < 4; ++i) {
        const int64_t size = view.shape[i - missing];
        if (!fits(size, full[i], at_least[i])) {
            invalid(argument, "each size must be 1 or that of (batch, heads_q, seqlen_q, seqlen_k), aligned to the right",
                    kScoreAxes[i], " is ", full[i], at_least[i] ? " or more" : "", ", shape ", Sizes{view.shape, view.ndim});
        }
        tensor.shape[i] = size;
        tensor.stride[i] = size > 1 ? view.stride[i - missing] : 0;
    }
    return tensor;
}

void check_score_covers(const ScoreTensor& tensor, const Argument& argument, int64_t rows, int64_t cols) {
    if (tensor.present && (!fits(tensor.shape[2], rows, true) || !fits(tensor.shape[3], cols, true))) {
        invalid(argument, "must cover the largest lengths of the packed sequences", "largest ", rows, " x ", cols, ", given ",
                tensor.shape[2], " x ", tensor.shape[3]);
    }
}

HeadTensor build_slopes(const TensorView& view, int64_t batch, int64_t heads, DType dtype, const Device& device) {
    if (view.ndim != 2) return build_head_vector(view, "alibi_slopes", heads, dtype, device);
    check_device(view, "alibi_slopes", device);
    check_float32_or(view, "alibi_slopes", dtype);
    check_shape(view, "alibi_slopes", {batch, heads}, "(heads_q,) or (batch, heads_q)");
    return {true, view.data, view.dtype, batch > 1 ? view.stride[0] : 0, heads > 1 ? view.stride[1] : 0};
}

HeadTensor build_head_vector(const TensorView& view, const Argument& argument, int64_t heads, DType dtype, const Device& device) {
    check_device(view, argument, device);
    check_float32_or(view, argument, dtype);
    check_shape(view, argument, {heads}, "(heads_q,)");
    return {true, view.data, view.dtype, 0, heads > 1 ? view.stride[0] : 0};
}

}  // namespace libflash
