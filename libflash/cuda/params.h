// Kernel parameters: small structs of plain values, passed by value; strides in elements. No CUDA header, so that host code can
// fill them. Also the plan and parameter types of each operation.
#pragma once

#include <cstdint>

#include "cuda/attention/decode_params.h"
#include "cuda/attention/params.h"
#include "cuda/config.h"
#include "cuda/plans.h"

namespace libflash::cuda {

enum class ElementType : int32_t { f16, bf16, f32 };

// A tensor of rows of contiguous channels, or of one number per row (lse).
struct RowTensor {
    void* data;
    int64_t batch, row, head;
    ElementType type;
    int32_t reserved;
};

constexpr int kMergeMax = 64;

struct MergeParams {
    int64_t batch, rows, heads;
    int32_t head_dim_v;
    int32_t count;
    RowTensor out;
    RowTensor lse;  // data is nullptr when it is not wanted
    RowTensor outs[kMergeMax];
    RowTensor lses[kMergeMax];
};
static_assert(sizeof(MergeParams) <= 32764, "kernel parameters are limited to 32764 bytes");

// A dense block mask and its lists, all contiguous. A pair of lists that is not wanted is nullptr.
struct CompressParams {
    const uint8_t* mask;
    int64_t matrices, rows, cols;
    int32_t* row_counts;
    int32_t* row_indices;
    int32_t* col_counts;
    int32_t* col_indices;
};

template <Operation>
struct TypesOf;
template <>
struct TypesOf<Operation::merge> {
    using Plan = MergePlan;
    using Params = MergeParams;
};
template <>
struct TypesOf<Operation::compress> {
    using Plan = CompressPlan;
    using Params = CompressParams;
};
template <>
struct TypesOf<Operation::forward> {
    using Plan = ForwardPlan;
    using Params = ForwardParams;
};
template <>
struct TypesOf<Operation::backward> {
    using Plan = BackwardPlan;
    using Params = BackwardParams;
};
template <>
struct TypesOf<Operation::decode> {
    using Plan = DecodePlan;
    using Params = DecodeParams;
};
template <Operation op>
using LaunchPlan = typename TypesOf<op>::Plan;
template <Operation op>
using LaunchParams = typename TypesOf<op>::Params;

}  // namespace libflash::cuda
