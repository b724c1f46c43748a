#include "cuda/host/merge_params.h"

#include "problem/check.h"
#include "problem/error.h"

namespace libflash::cuda {
namespace {

ElementType element_type(DType dtype) {
    switch (dtype) {
        case DType::f16: return ElementType::f16;
        case DType::bf16: return ElementType::bf16;
        case DType::f32: return ElementType::f32;
        default: throw Error(FLASH_STATUS_INTERNAL, "merge: a type without CUDA kernel reached the launch");
    }
}

// The stride of a dimension with one element has no meaning; 0 keeps it from limiting the vector width.
RowTensor row_tensor(const MergeProblem& problem, const TensorView& tensor, const RowStrides& strides) {
    return {tensor.data,
            problem.batch > 1 ? strides.batch : 0,
            problem.rows > 1 ? strides.row : 0,
            problem.heads > 1 ? strides.head : 0,
            element_type(tensor.dtype),
            0};
}

bool same_layout(const MergeLayout& x, const MergeLayout& y) {
    return x.out_batch == y.out_batch && x.out_row == y.out_row && x.out_head == y.out_head && x.lse_batch == y.lse_batch &&
           x.lse_row == y.lse_row && x.lse_head == y.lse_head && x.type == y.type;
}

// The index of a layout in params.layouts, whose first `known` are in use.
int layout_index(MergeMany& params, int& known, const MergeLayout& layout) {
    for (int n = 0; n < known; ++n) {
        if (same_layout(params.layouts[n], layout)) return n;
    }
    if (known == kMergeLayouts)
        throw Error(FLASH_STATUS_UNSUPPORTED,
                    text_of("outs: more than ", kMergeFewParts, " parts must have at most ", kMergeLayouts,
                            " different combinations of dtype and strides, with those of lses, on CUDA (", params.count,
                            " parts have more)"));
    params.layouts[known] = layout;
    return known++;
}

MergeSizes merge_sizes(const MergeProblem& problem) {
    MergeSizes sizes{};
    sizes.batch = problem.batch;
    sizes.rows = problem.rows;
    sizes.heads = problem.heads;
    sizes.head_dim_v = static_cast<int32_t>(problem.head_dim_v);
    sizes.count = problem.count;
    sizes.out = out_tensor(problem, problem.out);
    if (problem.lse.present) sizes.lse = lse_tensor(problem, problem.lse);
    return sizes;
}

MergeFew few_parts(const MergeProblem& problem) {
    MergeFew params{};
    static_cast<MergeSizes&>(params) = merge_sizes(problem);
    for (int n = 0; n < problem.count; ++n) {
        params.outs[n] = out_tensor(problem, problem.outs[n]);
        params.lses[n] = lse_tensor(problem, problem.lses[n]);
    }
    return params;
}

MergeMany many_parts(const MergeProblem& problem) {
    MergeMany params{};
    static_cast<MergeSizes&>(params) = merge_sizes(problem);
    int known = 0;
    for (int n = 0; n < problem.count; ++n) {
        const RowTensor out = out_tensor(problem, problem.outs[n]), lse = lse_tensor(problem, problem.lses[n]);
        const MergeLayout layout{out.batch, out.row, out.head, lse.batch, lse.row, lse.head, out.type, 0};
        params.outs[n] = out.data;
        params.lses[n] = lse.data;
        params.layout[n] = static_cast<uint8_t>(layout_index(params, known, layout));
    }
    return params;
}

}  // namespace

RowTensor out_tensor(const MergeProblem& problem, const TensorView& out) { return row_tensor(problem, out, row_strides(out)); }

RowTensor lse_tensor(const MergeProblem& problem, const TensorView& lse) { return row_tensor(problem, lse, lse_strides(lse)); }

MergeParams merge_params(const MergeProblem& problem) {
    if (problem.count <= kMergeFewParts) return {few_parts(problem)};
    if (problem.count <= kMergeManyParts) return {many_parts(problem)};
    throw Error(FLASH_STATUS_UNSUPPORTED, text_of("count: must be at most ", kMergeManyParts, " on CUDA (", problem.count, ")"));
}

}  // namespace libflash::cuda
