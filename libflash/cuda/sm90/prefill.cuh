// The long chunks of a decode call on sm_90a: the forward kernel over a cache. Its producer loads K and V by TMA from pages or
// entries (forward_cached_keys.cuh), and its scheduler selects the sequences with enough query rows; the decode kernels compute
// the other sequences. Invariant rows, 8-bit codes (forward_code_converter.cuh) and caches that TMA cannot load as they are
// (forward_copy_warpgroup.cuh) have separate instances.
#pragma once

#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/given_order.cuh"
#include "cuda/sm90/prefill_share.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel, ForwardInstance kInstance>
__global__ void __launch_bounds__(ForwardTraits<Kernel, kInstance>::kThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillParams params, const __grid_constant__ ForwardTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Traits = ForwardTraits<Kernel, kInstance>;
    if (Traits::kBesideDecode && params.multiprocessors > 0) {
        wait_for_previous_kernel();
        if (static_cast<int>(blockIdx.x) >= SequenceOrder(params).blocks()) return;
    }
    const ForwardContext<Traits> context(params, maps, Traits::QTile::align(shared));
    ForwardKernel<Traits>{context}.run();
}

// Computes the order, in one thread block, or takes it from a schedule.
template <class Kernel, int kTileRows>
__global__ void __launch_bounds__(kOrderThreads) prefill_order_kernel(const __grid_constant__ PrefillParams params) {
    wait_for_previous_kernel();
    allow_next_kernel();
    if (params.given_order) return take_given_order(params);
    const SequenceOrder order(params);
    const int units = write_sequence_order<kTileRows>(params), blocks = prefill_share(params, units);
    if (threadIdx.x == 0) order.blocks() = blocks;
    if (!params.in_pairs || params.order_alone) return;
    for (int unit = static_cast<int>(threadIdx.x); unit < units; unit += kOrderThreads) order.next_unit(params)[unit] = 0;
}

template <class Kernel, ForwardInstance kInstance>
int launch_prefill_instance(const PrefillPlan& plan, const PrefillParams& params, cudaStream_t stream) {
    using Traits = ForwardTraits<Kernel, kInstance>;
    const auto kernel = prefill_kernel<Kernel, kInstance>;
    ForwardTensorMaps maps{};
    cudaError_t error = cudaSuccess;
    if (!params.order_alone) {
        if constexpr (!Traits::kCopied || Traits::kCodes) error = encode_cache<Traits>(&maps, params);
        if (error == cudaSuccess) error = encode_queries<Traits>(&maps, params);
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.attention.shared_bytes);
        if (error != cudaSuccess) return error;
    }
    const auto order = prefill_order_kernel<Kernel, Traits::kBlockM>;
    const int launched = launch_dependent(order, plan.order.blocks, plan.order.threads, 0, stream, true, params);
    if (launched != cudaSuccess || params.order_alone) return launched;
    return launch_clusters(1 + params.in_pairs, kernel, plan.attention.blocks, plan.attention.threads,
                           plan.attention.shared_bytes, stream, true, params, maps);
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

// Calls do_with(instance as an integral_constant).
template <class Kernel, class DoWith>
auto with_prefill_instance(ForwardInstance instance, const DoWith& do_with) {
    if constexpr (has_invariant_prefill(Kernel::config)) {
        if (instance == ForwardInstance::invariant)
            return do_with(std::integral_constant<ForwardInstance, ForwardInstance::invariant>());
    }
    if constexpr (has_copied_prefill(Kernel::config)) {
        if (instance == ForwardInstance::copied)
            return do_with(std::integral_constant<ForwardInstance, ForwardInstance::copied>());
        if (instance == ForwardInstance::codes) return do_with(std::integral_constant<ForwardInstance, ForwardInstance::codes>());
    }
    return do_with(std::integral_constant<ForwardInstance, ForwardInstance::cache>());
}

template <class Kernel>
KernelResources resources_of_prefill(int step, int instance) {
    if (static_cast<ForwardStep>(step) == ForwardStep::order) return {sm90::kOrderThreads, 0};
    return with_prefill_instance<Kernel>(static_cast<ForwardInstance>(instance),
                                         [](auto kind) { return sm90::forward_resources<Kernel, decltype(kind)::value>(); });
}

// Enqueues the kernels on `stream`. Returns a CUDA error.
template <class Kernel>
int launch_prefill(const PrefillPlan& plan, const PrefillParams& params, void* stream) {
    return with_prefill_instance<Kernel>(static_cast<ForwardInstance>(plan.instance.number), [&](auto kind) {
        return sm90::launch_prefill_instance<Kernel, decltype(kind)::value>(plan, params, static_cast<cudaStream_t>(stream));
    });
}

}  // namespace libflash::cuda
