#include "cuda/host/merge_params.h"

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

}  // namespace

MergeParams merge_params(const MergeProblem& problem) {
    MergeParams params{};
    params.batch = problem.batch;
    params.rows = problem.rows;
    params.heads = problem.heads;
    params.head_dim_v = static_cast<int32_t>(problem.head_dim_v);
    params.count = problem.count;
    params.out = row_tensor(problem, problem.out, row_strides(problem.out));
    if (problem.lse.present) params.lse = row_tensor(problem, problem.lse, lse_strides(problem.lse));
    for (int n = 0; n < problem.count; ++n) {
        params.outs[n] = row_tensor(problem, problem.outs[n], row_strides(problem.outs[n]));
        params.lses[n] = row_tensor(problem, problem.lses[n], lse_strides(problem.lses[n]));
    }
    return params;
}

}  // namespace libflash::cuda
