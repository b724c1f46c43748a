// The long chunks of a decode call on sm_90a: the forward kernel over a cache. Its producer loads K and V through TMA from pages
// or entries (forward_cached_keys.cuh), and its scheduler takes the sequences with enough query rows; the decode kernels take the
// others.
#pragma once

#include "cuda/sm90/forward.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel>
__global__ void __launch_bounds__(ForwardTraits<Kernel, ForwardInstance::cache>::kThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillParams params, const __grid_constant__ ForwardTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Traits = ForwardTraits<Kernel, ForwardInstance::cache>;
    const ForwardContext<Traits> context(params, maps, Traits::QTile::align(shared));
    ForwardKernel<Traits>{context}.run();
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_prefill(int step, int) {
    if (static_cast<ForwardStep>(step) == ForwardStep::order) return {sm90::kOrderThreads, 0};
    return sm90::forward_resources<Kernel, ForwardInstance::cache>();
}

// Enqueues the kernels on `stream`. Returns a CUDA error.
template <class Kernel>
int launch_prefill(const PrefillPlan& plan, const PrefillParams& params, void* stream) {
    using Traits = sm90::ForwardTraits<Kernel, ForwardInstance::cache>;
    const auto kernel = sm90::prefill_kernel<Kernel>;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    sm90::ForwardTensorMaps maps{};
    cudaError_t error = sm90::encode_cache<Traits>(&maps, params);
    if (error == cudaSuccess) error = sm90::encode_queries<Traits>(&maps, params);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.attention.shared_bytes);
    if (error != cudaSuccess) return error;
    const auto order = sm90::order_kernel<Kernel, Traits::kBlockM, PrefillParams>;
    order<<<static_cast<unsigned>(plan.order.blocks), plan.order.threads, 0, cuda_stream>>>(params);
    return launch_dependent(kernel, plan.attention.blocks, plan.attention.threads, plan.attention.shared_bytes, cuda_stream, true,
                            params, maps);
}

}  // namespace libflash::cuda
