// The plan of merge: a group of threads for each row, and the widest vector that alignment allows.
#include <algorithm>

#include "cuda/any/plan.h"
#include "cuda/host/merge_params.h"
#include "cuda/kernels.h"
#include "problem/check.h"
#include "problem/error.h"

namespace libflash::cuda::any {

namespace {

int element_bytes(ElementType type) { return type == ElementType::f32 ? 4 : 2; }

// Whether `vector` neighbouring elements can be loaded at once in every row of the tensor.
bool allows(const RowTensor& tensor, int vector) {
    const uint64_t element = static_cast<uint64_t>(element_bytes(tensor.type)),
                   alignment = std::min<uint64_t>(static_cast<uint64_t>(vector) * element, 16);
    const auto fits = [&](int64_t stride) { return static_cast<uint64_t>(stride) * element % alignment == 0; };
    return reinterpret_cast<uintptr_t>(tensor.data) % alignment == 0 && fits(tensor.batch) && fits(tensor.row) &&
           fits(tensor.head);
}

int widest_vector(const MergeParams& p) {
    for (const int vector : {8, 4}) {
        bool all = p.head_dim_v % vector == 0 && allows(p.out, vector);
        for (int n = 0; n < p.count; ++n) all = all && allows(p.outs[n], vector);
        if (all) return vector;
    }
    return 1;
}

bool has_mixed_types(const MergeParams& p) {
    for (int n = 1; n < p.count; ++n) {
        if (p.outs[n].type != p.outs[0].type) return true;
    }
    return false;
}

}  // namespace

MergePlan plan_merge(const Kernel& kernel, const MergeProblem& problem, const DeviceProperties&) {
    if (problem.count > kMergeMax)
        throw Error(FLASH_STATUS_UNSUPPORTED, text_of("count: must be at most ", kMergeMax, " on CUDA (", problem.count, ")"));
    if (problem.head_dim_v > INT32_MAX / 2) throw Error(FLASH_STATUS_UNSUPPORTED, "outs: head_dim_v must be below 2^30 on CUDA");
    const MergeParams params = merge_params(problem);
    MergePlan plan;
    plan.vector = widest_vector(params);
    plan.mixed = has_mixed_types(params);
    while (plan.group < 32 && plan.group * plan.vector < params.head_dim_v) plan.group *= 2;
    KernelResources resources = kernel.resources(0, 0);
    const int rows_of_block = resources.threads / plan.group;
    resources.shared_bytes = static_cast<int>(sizeof(float)) * rows_of_block * params.count;  // the weights of the parts
    const int64_t rows = params.batch * params.rows * params.heads, blocks = (rows + rows_of_block - 1) / rows_of_block;
    plan.merge = launch_shape(std::min<int64_t>(blocks, INT32_MAX), resources);
    return plan;
}

}  // namespace libflash::cuda::any
