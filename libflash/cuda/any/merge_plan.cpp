// The plan of merge: a group of threads for each row, and the widest vector that the alignment of all tensors allows.
#include <algorithm>

#include "cuda/any/plan.h"
#include "cuda/host/merge_params.h"
#include "cuda/kernels.h"
#include "problem/check.h"
#include "problem/error.h"

namespace libflash::cuda::any {

namespace {

constexpr int kMostWeightBytes = 48 << 10;  // shared memory that every kernel may have
static_assert(sizeof(float) * 4 * kMergeManyParts <= kMostWeightBytes,
              "a thread block has a row for each of its 4 warps at least");

int element_bytes(ElementType type) { return type == ElementType::f32 ? 4 : 2; }

// Whether `vector` neighbouring elements can be loaded at once in every row of the tensor.
bool allows(const RowTensor& tensor, int vector) {
    const uint64_t element = static_cast<uint64_t>(element_bytes(tensor.type)),
                   alignment = std::min<uint64_t>(static_cast<uint64_t>(vector) * element, 16);
    const auto fits = [&](int64_t stride) { return static_cast<uint64_t>(stride) * element % alignment == 0; };
    return reinterpret_cast<uintptr_t>(tensor.data) % alignment == 0 && fits(tensor.batch) && fits(tensor.row) &&
           fits(tensor.head);
}

int widest_vector(const MergeProblem& p) {
    for (const int vector : {8, 4}) {
        bool all = p.head_dim_v % vector == 0 && allows(out_tensor(p, p.out), vector);
        for (const TensorView& out : p.outs) all = all && allows(out_tensor(p, out), vector);
        if (all) return vector;
    }
    return 1;
}

bool has_mixed_types(const MergeProblem& p) {
    return std::any_of(p.outs.begin(), p.outs.end(), [&](const TensorView& out) { return out.dtype != p.outs[0].dtype; });
}

}  // namespace

MergePlan plan_merge(const Kernel& kernel, const MergeProblem& problem, const DeviceProperties&) {
    if (problem.head_dim_v > INT32_MAX / 2) throw Error(FLASH_STATUS_UNSUPPORTED, "outs: head_dim_v must be below 2^30 on CUDA");
    MergePlan plan;
    plan.params = std::make_unique<const MergeParams>(merge_params(problem));
    plan.vector = widest_vector(problem);
    plan.mixed = has_mixed_types(problem);
    KernelResources resources = kernel.resources(0, 0);
    const auto weight_bytes = [&] { return static_cast<int>(sizeof(float)) * (resources.threads / plan.group) * problem.count; };
    while (plan.group < 32 && (plan.group * plan.vector < problem.head_dim_v || weight_bytes() > kMostWeightBytes))
        plan.group *= 2;
    resources.shared_bytes = weight_bytes();
    const int rows_of_block = resources.threads / plan.group;
    const int64_t rows = problem.batch * problem.rows * problem.heads, blocks = (rows + rows_of_block - 1) / rows_of_block;
    plan.merge = launch_shape(std::min<int64_t>(blocks, INT32_MAX), resources);
    return plan;
}

}  // namespace libflash::cuda::any
