// FlashAttention-3 forward for sm_90a (Shah and others, arXiv 2407.08608): the kernel's entry and its launch. Persistent thread
// blocks compute one work tile after another: a producer warpgroup finds work tiles and loads Q, K and V by TMA, consumer
// warpgroups compute (forward_kernel.cuh). Rows that overflow under a kept maximum (online_softmax.cuh) are recorded; after its
// last work tile a thread block recomputes the work tiles with such rows.
#pragma once

#include "cuda/attention/launch_dependent.cuh"
#include "cuda/params.h"
#include "cuda/sm90/forward_kernel.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

template <class Kernel, ForwardInstance kInstance>
__global__ void __launch_bounds__(ForwardTraits<Kernel, kInstance>::kThreads, 1)
    forward_kernel(const __grid_constant__ typename ForwardTraits<Kernel, kInstance>::Params params,
                   const __grid_constant__ ForwardTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Traits = ForwardTraits<Kernel, kInstance>;
    const ForwardContext<Traits> context(params, maps, Traits::QTile::align(shared));
    ForwardKernel<Traits>{context}.run();
}

template <class Kernel, ForwardInstance kInstance>
constexpr KernelResources forward_resources() {
    using Traits = ForwardTraits<Kernel, kInstance>;
    return {Traits::kThreads, ForwardKernel<Traits>::kSharedBytes};
}

template <class Kernel, ForwardInstance kInstance>
int launch_instance(const ForwardPlan& plan, const typename ForwardTraits<Kernel, kInstance>::Params& params,
                    cudaStream_t stream) {
    using Traits = ForwardTraits<Kernel, kInstance>;
    const auto kernel = forward_kernel<Kernel, kInstance>;
    ForwardTensorMaps maps{};
    cudaError_t error = encode<Traits>(&maps, params);
    // At each launch, because the attribute holds for the current device only.
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.attention.shared_bytes);
    if (error != cudaSuccess) return error;
    if constexpr (Traits::kDynamic) {
        if (plan.order.blocks > 0) {
            const auto order = order_kernel<Kernel, Traits::kBlockM, ForwardParams>;
            const ForwardParams& lengths = params;  // the kernel is the same with statistics of rows
            const int launched = launch_dependent(order, plan.order.blocks, plan.order.threads, 0, stream, true, lengths);
            if (launched != cudaSuccess) return launched;
        }
    }
    return launch_dependent(kernel, plan.attention.blocks, plan.attention.threads, plan.attention.shared_bytes, stream, true,
                            params, maps);
}

// Calls do_with(instance as an integral_constant).
template <class Kernel, class DoWith>
auto with_instance(int instance, const DoWith& do_with) {
    switch (static_cast<ForwardInstance>(instance)) {
        case ForwardInstance::general: return do_with(std::integral_constant<ForwardInstance, ForwardInstance::general>());
        case ForwardInstance::block_mask: return do_with(std::integral_constant<ForwardInstance, ForwardInstance::block_mask>());
        case ForwardInstance::dynamic:
            if constexpr (has_dynamic_instance(Kernel::config))
                return do_with(std::integral_constant<ForwardInstance, ForwardInstance::dynamic>());
            break;
        case ForwardInstance::narrow:
            if constexpr (has_narrow_instance(Kernel::config))
                return do_with(std::integral_constant<ForwardInstance, ForwardInstance::narrow>());
            break;
        case ForwardInstance::plain: break;
        case ForwardInstance::cache: break;       // only in the prefill kernels: prefill.cuh
        case ForwardInstance::invariant: break;   // likewise
        case ForwardInstance::copied: break;      // likewise
        case ForwardInstance::codes: break;       // likewise
        case ForwardInstance::statistics: break;  // only in the statistics kernels: forward_statistics.cuh
        case ForwardInstance::maxima: break;      // likewise
        case ForwardInstance::entropy: break;     // likewise
    }
    return do_with(std::integral_constant<ForwardInstance, ForwardInstance::plain>());
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward(int step, int instance) {
    if (static_cast<ForwardStep>(step) == ForwardStep::order) return {sm90::kOrderThreads, 0};
    return sm90::with_instance<Kernel>(instance,
                                       [](auto kind) { return sm90::forward_resources<Kernel, decltype(kind)::value>(); });
}

// Enqueues the kernels on `stream`. Returns a CUDA error.
template <class Kernel>
int launch_forward(const ForwardPlan& plan, const ForwardParams& params, void* stream) {
    return sm90::with_instance<Kernel>(plan.instance.number, [&](auto kind) {
        return sm90::launch_instance<Kernel, decltype(kind)::value>(plan, params, static_cast<cudaStream_t>(stream));
    });
}

}  // namespace libflash::cuda
