// Forward with statistics of rows for sm_90a: the instance with block masks and long sums, without rare options.
#pragma once

#include "cuda/attention/start_head_maxima.cuh"
#include "cuda/sm90/forward.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel>
using StatisticsTraits = ForwardTraits<Kernel, ForwardInstance::statistics>;

template <class Kernel>
__global__ void __launch_bounds__(StatisticsTraits<Kernel>::kThreads, 1)
    forward_statistics_kernel(const __grid_constant__ ForwardStatisticsParams params,
                              const __grid_constant__ ForwardTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Traits = StatisticsTraits<Kernel>;
    const ForwardContext<Traits> context(params, maps, Traits::QTile::align(shared));
    ForwardKernel<Traits>{context}.run();
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward_statistics(int step, int) {
    switch (static_cast<ForwardStep>(step)) {
        case ForwardStep::order: return {sm90::kOrderThreads, 0};
        case ForwardStep::head_maxima: return {kHeadMaximaThreads, 0};
        case ForwardStep::attention: break;
    }
    return sm90::forward_resources<Kernel, ForwardInstance::statistics>();
}

// Enqueues the kernels on `stream`. Returns a CUDA error.
template <class Kernel>
int launch_forward_statistics(const ForwardPlan& plan, const ForwardStatisticsParams& params, void* stream) {
    using Traits = sm90::StatisticsTraits<Kernel>;
    const auto on = static_cast<cudaStream_t>(stream);
    start_head_maxima<Kernel>(plan.head_maxima, params.head_maxima, params, on);
    if (plan.attention.blocks == 0) return cudaGetLastError();
    const auto kernel = sm90::forward_statistics_kernel<Kernel>;
    sm90::ForwardTensorMaps maps{};
    cudaError_t error = sm90::encode<Traits>(&maps, params);
    // At each launch, because the attribute holds for the current device only.
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.attention.shared_bytes);
    if (error != cudaSuccess) return error;
    if (plan.order.blocks > 0) {
        const auto order = sm90::order_kernel<Kernel, Traits::kBlockM, ForwardParams>;
        order<<<static_cast<unsigned>(plan.order.blocks), plan.order.threads, 0, on>>>(params);
    }
    return launch_dependent(kernel, plan.attention.blocks, plan.attention.threads, plan.attention.shared_bytes, on, true, params,
                            maps);
}

}  // namespace libflash::cuda
