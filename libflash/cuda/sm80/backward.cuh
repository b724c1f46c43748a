// FlashAttention-2 backward for sm_80 and later: what each query row needs (row_facts), the gradients of keys and values with the sums of the
// query gradient (key_gradients), and those sums rounded (query_sums).
#pragma once

#include <type_traits>

#include "cuda/attention/row_facts.cuh"
#include "cuda/params.h"
#include "cuda/sm80/key_gradients.cuh"
#include "cuda/sm80/query_sums.cuh"

namespace libflash::cuda::sm80 {

template <class Row>
struct BackwardRow {
    static constexpr KernelConfig config = Row::config;
    using T = std::conditional_t<config.dtype == RowType::f16_, __half, __nv_bfloat16>;
    template <bool kGeneral>
    using Keys = KeyGradients<T, config.head_dim, config.tile_q, config.tile_k, config.stages, kGeneral>;
    using Facts = RowFactsUnit<T>;
    using Sums = typename Keys<false>::Sums;
    static constexpr int kThreads = Keys<false>::kThreads;
    static constexpr int kMinBlocks = kThreads <= 128 ? 2 : 1;
    static constexpr int kSumsPerUnit = kUnitRows * config.head_dim;
    static_assert(Keys<false>::kSharedBytes ==
                      backward_shared_bytes(config.head_dim, config.tile_q, config.tile_k, config.stages),
                  "the host and the kernel must agree");
};

template <class Row>
__global__ void __launch_bounds__(BackwardRow<Row>::Facts::kThreads) row_facts_kernel(const __grid_constant__ BackwardParams params) {
    typename BackwardRow<Row>::Facts unit{params, {}, {}};
    unit.run(BackwardRow<Row>::kSumsPerUnit);
}

template <class Row, bool kGeneral>
__global__ void __launch_bounds__(BackwardRow<Row>::kThreads, BackwardRow<Row>::kMinBlocks)
    key_gradients_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(128) char shared[];
    typename BackwardRow<Row>::template Keys<kGeneral> body(params, shared);
    body.run();
}

template <class Row>
__global__ void __launch_bounds__(BackwardRow<Row>::kThreads) query_sums_kernel(const __grid_constant__ BackwardParams params) {
    __shared__ __align__(128) char shared[SharedTile<BackwardRow<Row>::config.tile_q, BackwardRow<Row>::config.head_dim>::kBytes];
    BackwardRow<Row>::Sums::convert(params, shared);
}

template <class Row>
__global__ void __launch_bounds__(SinkGradient<typename BackwardRow<Row>::T>::kThreads)
    sink_gradient_kernel(const __grid_constant__ BackwardParams params) {
    SinkGradient<typename BackwardRow<Row>::T>::run(params);
}

template <class Row, bool kGeneral>
int launch_key_gradients(const BackwardParams& params, cudaStream_t stream) {
    constexpr int kSharedBytes = BackwardRow<Row>::template Keys<kGeneral>::kSharedBytes;
    const auto kernel = key_gradients_kernel<Row, kGeneral>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    const unsigned blocks = static_cast<unsigned>(int64_t{params.key_schedule.heads} * params.key_schedule.tiles);
    if (blocks == 0) return cudaSuccess;
    kernel<<<blocks, BackwardRow<Row>::kThreads, kSharedBytes, stream>>>(params);
    return cudaGetLastError();
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

// Enqueues the work on `stream` and returns what cudaGetLastError() then says.
template <class Row>
int launch_backward(const BackwardParams& params, void* stream) {
    using namespace sm80;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const unsigned units = static_cast<unsigned>(int64_t{params.query_schedule.heads} * params.query_schedule.tiles);
    if (units > 0) row_facts_kernel<Row><<<units, BackwardRow<Row>::Facts::kThreads, 0, cuda_stream>>>(params);
    const int error = params.general ? launch_key_gradients<Row, true>(params, cuda_stream)
                                     : launch_key_gradients<Row, false>(params, cuda_stream);
    if (error != cudaSuccess) return error;
    if (units > 0) query_sums_kernel<Row><<<units, BackwardRow<Row>::kThreads, 0, cuda_stream>>>(params);
    if (params.dsink.data)
        sink_gradient_kernel<Row><<<params.heads_q, SinkGradient<typename BackwardRow<Row>::T>::kThreads, 0, cuda_stream>>>(params);
    return cudaGetLastError();
}

}  // namespace libflash::cuda
