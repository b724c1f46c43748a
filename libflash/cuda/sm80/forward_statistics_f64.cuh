// Forward in float64 with statistics of rows.
#pragma once

#include "cuda/attention/start_head_maxima.cuh"
#include "cuda/sm80/forward_statistics_rows_f64.cuh"

namespace libflash::cuda::sm80 {

template <class Kernel>
using DoubleStatistics = DoubleStatisticsForward<Kernel::config.head_dim, Kernel::config.tile_q, Kernel::config.tile_k>;

template <class Kernel>
__global__ void __launch_bounds__(kDoubleThreads, 2)
    forward_statistics_kernel(const __grid_constant__ ForwardStatisticsParams params) {
    extern __shared__ __align__(128) char shared[];
    DoubleStatistics<Kernel> body(params, shared);
    body.run();
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward_statistics(int step, int) {
    if (static_cast<ForwardStep>(step) == ForwardStep::head_maxima) return {kHeadMaximaThreads, 0};
    return {sm80::kDoubleThreads, sm80::DoubleStatistics<Kernel>::kSharedBytes};
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_forward_statistics(const ForwardPlan& plan, const ForwardStatisticsParams& params, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    start_head_maxima<Kernel>(plan.head_maxima, reinterpret_cast<double*>(params.head_maxima), params, on);
    const LaunchShape& shape = plan.attention;
    if (shape.blocks == 0) return cudaGetLastError();
    const auto kernel = sm80::forward_statistics_kernel<Kernel>;
    // Set at every launch, because the attribute belongs to the current device.
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, on>>>(params);
    return cudaGetLastError();
}

}  // namespace libflash::cuda
