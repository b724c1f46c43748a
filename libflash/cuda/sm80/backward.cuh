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

template <class Row, bool kGeneral>
int launch_gradients(const BackwardParams& params, cudaStream_t stream) {
    using Keys = typename BackwardRow<Row>::template Keys<kGeneral>;
    using Queries = typename BackwardRow<Row>::template Queries<kGeneral>;
    const int error = enqueue(key_gradients_kernel<Row, kGeneral>, params, blocks_of(params.key_schedule), Keys::kThreads,
                              Keys::kSharedBytes, stream);
    if (error != cudaSuccess) return error;
    if (params.dq_sums)
        return enqueue(query_sums_kernel<Row>, params, blocks_of(params.query_schedule), BackwardRow<Row>::kThreads, 0, stream);
    return enqueue(query_gradient_kernel<Row, kGeneral>, params, blocks_of(params.query_tile_schedule), Queries::kThreads,
                   Queries::kSharedBytes, stream);
}

template <class Row>
int launch_bias_gradient(const BackwardParams& params, cudaStream_t stream) {
    using Bias = typename BackwardRow<Row>::Bias;
    const int32_t* extent = params.dbias.extent;
    const int64_t row_tiles = (int64_t{extent[2]} + Bias::kBlockM - 1) / Bias::kBlockM;
    const int64_t col_tiles = (int64_t{extent[3]} + Bias::kBlockN - 1) / Bias::kBlockN;
    return enqueue(bias_gradient_kernel<Row>, params, extent[0] * extent[1] * row_tiles * col_tiles, Bias::kThreads,
                   Bias::kSharedBytes, stream);
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

// Enqueues the work on `stream` and returns what cudaGetLastError() then says.
template <class Row>
int launch_backward(const BackwardParams& params, void* stream) {
    using namespace sm80;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    int error = launch_row_facts<Row>(params, cuda_stream);
    if (error == cudaSuccess)
        error =
            params.general ? launch_gradients<Row, true>(params, cuda_stream) : launch_gradients<Row, false>(params, cuda_stream);
    if (error == cudaSuccess) error = launch_sink_gradient<Row>(params, cuda_stream);
    if (error == cudaSuccess && params.dbias.data) error = launch_bias_gradient<Row>(params, cuda_stream);
    return error;
}

}  // namespace libflash::cuda
