// FlashAttention-2 backward for sm_80 and later: what each query row needs (row_facts), the gradients of keys and values with the sums of the
// query gradient (key_gradients), and those sums rounded (query_sums).
#pragma once

#include <type_traits>

#include "cuda/attention/backward_steps.cuh"
#include "cuda/attention/query_sums.cuh"
#include "cuda/params.h"
#include "cuda/sm80/bias_gradient.cuh"
#include "cuda/sm80/key_gradients.cuh"
#include "cuda/sm80/key_gradients_f32.cuh"
#include "cuda/sm80/query_gradient.cuh"

namespace libflash::cuda::sm80 {

template <class Row>
struct BackwardRow {
    static constexpr KernelConfig config = Row::config;
    using T = ElementOf<config.dtype>;
    static constexpr bool kFloat = config.dtype == RowType::f32_;
    template <bool kGeneral>
    using Keys =
        std::conditional_t<kFloat, FloatKeyGradients<config.head_dim, config.tile_q, config.tile_k, config.stages, kGeneral>,
                           KeyGradients<std::conditional_t<kFloat, __half, T>, config.head_dim, config.tile_q, config.tile_k,
                                        config.stages, kGeneral>>;
    template <bool kGeneral>
    using Queries = QueryGradient<T, config.head_dim, kGeneral>;
    using Bias = BiasGradient<T, config.head_dim>;
    using Sums = typename Keys<false>::Sums;
    static constexpr int kThreads = Keys<false>::kThreads;
    static constexpr int kMinBlocks = kThreads <= 128 ? 2 : 1;
    static_assert(Keys<false>::kSharedBytes ==
                      backward_shared_bytes(config.head_dim, config.tile_q, config.tile_k, config.stages, sizeof(T)),
                  "the host and the kernel must agree");
};

template <class Row, bool kGeneral>
__global__ void __launch_bounds__(BackwardRow<Row>::kThreads, BackwardRow<Row>::kMinBlocks)
    key_gradients_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(128) char shared[];
    typename BackwardRow<Row>::template Keys<kGeneral> body(params, shared);
    body.run();
}

template <class Row>
__global__ void __launch_bounds__(BackwardRow<Row>::kThreads) query_sums_kernel(const __grid_constant__ BackwardParams params) {
    if constexpr (BackwardRow<Row>::kFloat) {
        BackwardRow<Row>::Sums::convert(params);
    } else {
        __shared__ __align__(
            128) char shared[SharedTile<BackwardRow<Row>::config.tile_q, BackwardRow<Row>::config.head_dim>::kBytes];
        BackwardRow<Row>::Sums::convert(params, shared);
    }
}

template <class Row, bool kGeneral>
__global__ void __launch_bounds__(BackwardRow<Row>::template Queries<kGeneral>::kThreads, 2)
    query_gradient_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(128) char shared[];
    typename BackwardRow<Row>::template Queries<kGeneral> body(params, shared);
    body.run();
}

template <class Row>
__global__ void __launch_bounds__(BackwardRow<Row>::Bias::kThreads, 2)
    bias_gradient_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(128) char shared[];
    typename BackwardRow<Row>::Bias body(params, shared);
    body.run();
}

// dk and dv, then dq.
template <class Row, bool kGeneral>
int launch_gradients(const BackwardPlan& plan, const BackwardParams& params, cudaStream_t stream) {
    int error = enqueue(key_gradients_kernel<Row, kGeneral>, plan.key_gradients, params, stream);
    if (error == cudaSuccess) error = enqueue(query_sums_kernel<Row>, plan.dq_conversion, params, stream);
    if (error == cudaSuccess) error = enqueue(query_gradient_kernel<Row, kGeneral>, plan.query_gradient, params, stream);
    return error;
}

template <class Row, bool kGeneral>
KernelResources backward_resources(BackwardStep step) {
    using Keys = typename BackwardRow<Row>::template Keys<kGeneral>;
    using Queries = typename BackwardRow<Row>::template Queries<kGeneral>;
    using Bias = typename BackwardRow<Row>::Bias;
    switch (step) {
        case BackwardStep::statistics: return {RowFactsOf<Row>::kThreads, 0};
        case BackwardStep::key_gradients: return {Keys::kThreads, Keys::kSharedBytes};
        case BackwardStep::dq_conversion: return {BackwardRow<Row>::kThreads, 0};
        case BackwardStep::query_gradient: return {Queries::kThreads, Queries::kSharedBytes};
        case BackwardStep::sink_gradient: return {SinkGradientOf<Row>::kThreads, 0};
        default: return {Bias::kThreads, Bias::kSharedBytes};
    }
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

template <class Row>
KernelResources resources_of_backward(int step, int instance) {
    const auto resources =
        instance == kGeneralInstance.number ? sm80::backward_resources<Row, true> : sm80::backward_resources<Row, false>;
    return resources(static_cast<BackwardStep>(step));
}

// Enqueues the work on `stream` and returns what cudaGetLastError() then says.
template <class Row>
int launch_backward(const BackwardPlan& plan, const BackwardParams& params, void* stream) {
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const auto launch_gradients =
        plan.instance.number == kGeneralInstance.number ? sm80::launch_gradients<Row, true> : sm80::launch_gradients<Row, false>;
    int error = enqueue(row_facts_kernel<Row>, plan.statistics, params, cuda_stream);
    if (error == cudaSuccess) error = launch_gradients(plan, params, cuda_stream);
    if (error == cudaSuccess) error = enqueue(sink_gradient_kernel<Row>, plan.sink_gradient, params, cuda_stream);
    if (error == cudaSuccess) error = enqueue(sm80::bias_gradient_kernel<Row>, plan.bias_gradient, params, cuda_stream);
    return error;
}

}  // namespace libflash::cuda
