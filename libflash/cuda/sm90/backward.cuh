// FlashAttention-3 backward for sm_90a (Shah and others, arXiv 2407.08608). Its kernels compute the softmax statistics, then dK,
// dV and the dQ accumulator, then dQ from the accumulator, then the gradient of a sink. In the second one a thread block has one
// key tile: the first warpgroup loads tiles and computes the dQ accumulator (backward_dq.cuh), the other two have 64 keys each
// (backward_dk_dv.cuh).
#pragma once

#include "cuda/attention/backward_steps.cuh"
#include "cuda/params.h"
#include "cuda/sm90/backward_dk_dv.cuh"
#include "cuda/sm90/extent.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel>
__global__ void __launch_bounds__(Backward<Kernel>::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params, const __grid_constant__ BackwardMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Body = Backward<Kernel>;
    Body body(params, maps, Body::QTile::first_place(shared));
    body.run();
}

template <class Kernel>
__global__ void __launch_bounds__(Backward<Kernel>::Accumulator::kWarps * 32)
    dq_accumulator_kernel(const __grid_constant__ BackwardParams params) {
    using Body = Backward<Kernel>;
    __shared__ __align__(128) char shared[SharedTile<Body::kBlockM, Body::kHeadDim>::kBytes];
    Body::Accumulator::convert(params, shared);
}

template <class Kernel>
cudaError_t encode(BackwardMaps* maps, const BackwardParams& params) {
    using Body = Backward<Kernel>;
    using T = typename Body::T;
    const int64_t queries = params.q_lengths.capacity, keys = params.k_lengths.capacity, dim = params.head_dim,
                  dim_v = params.head_dim_v;
    cudaError_t error = cudaSuccess;
    // A map needs a valid address also where the tensor has no rows: there q and dout get the map of k, which is not used.
    const auto one = [&](CUtensorMap& map, const TensorExtent& tensor, int rows) {
        if (error == cudaSuccess) error = encode_map<T>(&map, tensor, rows);
    };
    const TensorExtent k = extent(params.k, dim, keys, params.heads_k, params.batch);
    const auto of_queries = [&](const RowsParams& rows, int64_t columns) {
        return queries == 0 ? k : extent(rows, columns, queries, params.heads_q, params.batch);
    };
    one(maps->q, of_queries(params.q, dim), Body::kBlockM);
    one(maps->dout, of_queries(params.dout, dim_v), Body::kBlockM);
    one(maps->k, k, Body::kBlockN);
    one(maps->v, extent(params.v, dim_v, keys, params.heads_k, params.batch), Body::kBlockN);
    one(maps->dk, extent(params.dk, dim, keys, params.heads_k, params.batch), 16);
    one(maps->dv, extent(params.dv, dim_v, keys, params.heads_k, params.batch), 16);
    return error;
}

template <class Kernel>
int launch_dk_dv(const LaunchShape& shape, const BackwardParams& params, cudaStream_t stream) {
    if (shape.blocks == 0) return cudaSuccess;
    const auto kernel = backward_kernel<Kernel>;
    BackwardMaps maps{};
    cudaError_t error = encode<Kernel>(&maps, params);
    // At each launch, because the attribute holds for the current device only.
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(params, maps);
    return cudaGetLastError();
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_backward(int step, int) {
    using Body = sm90::Backward<Kernel>;
    switch (static_cast<BackwardStep>(step)) {
        case BackwardStep::statistics: return {SoftmaxStatisticsOf<Kernel>::kThreads, 0};
        case BackwardStep::dk_dv: return {Body::kThreads, Body::kSharedBytes};
        case BackwardStep::dq_conversion: return {Body::Accumulator::kWarps * 32, 0};
        case BackwardStep::dsink: return {DsinkOf<Kernel>::kThreads, 0};
        default: return {0, 0};  // no such step
    }
}

// Enqueues the kernels on `stream`. Returns the first CUDA error.
template <class Kernel>
int launch_backward(const BackwardPlan& plan, const BackwardParams& params, void* stream) {
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    int error = enqueue(softmax_statistics_kernel<Kernel>, plan.statistics, params, cuda_stream);
    if (error == cudaSuccess) error = sm90::launch_dk_dv<Kernel>(plan.dk_dv, params, cuda_stream);
    if (error == cudaSuccess) error = enqueue(sm90::dq_accumulator_kernel<Kernel>, plan.dq_conversion, params, cuda_stream);
    if (error == cudaSuccess) error = enqueue(dsink_kernel<Kernel>, plan.dsink, params, cuda_stream);
    return error;
}

}  // namespace libflash::cuda
