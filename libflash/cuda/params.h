// For each operation the types of its plan and of its kernel parameters. The parameters are plain values and are passed by value.
// No CUDA header, so that host code can fill them.
#pragma once

#include <cstdint>

#include "cuda/attention/cache_params.h"
#include "cuda/attention/decode_params.h"
#include "cuda/attention/params.h"
#include "cuda/attention/prefill_params.h"
#include "cuda/attention/tangent_params.h"
#include "cuda/config.h"
#include "cuda/plans.h"

namespace libflash::cuda {

// A dense block mask and its lists, all contiguous. A pair of lists that is not wanted is nullptr.
struct CompressParams {
    const uint8_t* mask;
    int64_t matrices, rows, cols;
    int32_t* row_counts;
    int32_t* row_indices;
    int32_t* col_counts;
    int32_t* col_indices;
};

struct MergePlan;  // merge_plan.h
struct MergeParams;

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
struct TypesOf<Operation::cache_write> {
    using Plan = CacheWritePlan;
    using Params = CacheWriteParams;
};
template <>
struct TypesOf<Operation::forward> {
    using Plan = ForwardPlan;
    using Params = ForwardStatisticsParams;  // most kernels take its base class, ForwardParams
};
template <>
struct TypesOf<Operation::backward> {
    using Plan = BackwardPlan;
    using Params = BackwardParams;
};
template <>
struct TypesOf<Operation::forward_tangent> {
    using Plan = ForwardTangentPlan;
    using Params = ForwardTangentParams;
};
template <>
struct TypesOf<Operation::backward_tangent> {
    using Plan = BackwardTangentPlan;
    using Params = BackwardTangentParams;
};
template <>
struct TypesOf<Operation::decode> {
    using Plan = DecodePlan;
    using Params = DecodeParams;
};
template <>
struct TypesOf<Operation::prefill> {
    using Plan = PrefillPlan;
    using Params = PrefillParams;
};
template <>
struct TypesOf<Operation::decode_prefix> : TypesOf<Operation::decode> {};
template <Operation op>
using LaunchPlan = typename TypesOf<op>::Plan;
template <Operation op>
using LaunchParams = typename TypesOf<op>::Params;

}  // namespace libflash::cuda
