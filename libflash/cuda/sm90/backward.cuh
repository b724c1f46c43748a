// FlashAttention-3 backward for sm_90a (Shah and others, arXiv 2407.08608). Its kernels compute the softmax statistics, then dK,
// dV and the dQ accumulator, then dQ from the accumulator, then dsink. A kernel of sm80 computes dbias. In the second kernel a
// persistent thread block processes one work tile after another. It has four warpgroups: the first loads tiles
// (backward_producer.cuh), the second computes the dQ accumulator (backward_dq.cuh), the other two have 64 keys each
// (backward_dk_dv.cuh, backward_halves.cuh, backward_general.cuh), or divide the products of 64 keys (backward_divided.cuh).
#pragma once

#include "cuda/attention/backward_steps.cuh"
#include "cuda/params.h"
#include "cuda/sm90/backward_dq_counters.cuh"
#include "cuda/sm90/backward_kernel.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

template <class Kernel, BackwardInstance kInstance, bool kFixedOrder>
__global__ void __launch_bounds__(BackwardTraits<Kernel, kInstance, kFixedOrder>::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params, const __grid_constant__ BackwardTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Traits = BackwardTraits<Kernel, kInstance, kFixedOrder>;
    BackwardContext<Traits> context(params, maps, Traits::QTile::align(shared));
    BackwardKernel<Traits>{context}.run();
}

template <class Kernel, int kParts>
__global__ void __launch_bounds__(BackwardTraits<Kernel>::Accumulator::kWarps * 32)
    dq_accumulator_kernel(const __grid_constant__ BackwardParams params) {
    using Traits = BackwardTraits<Kernel>;
    __shared__ __align__(128) char shared[SharedTile<Traits::kBlockM, Traits::kHeadDim>::kBytes];
    Traits::Accumulator::template convert<false, kParts>(params, shared);
}

template <class Kernel, bool kBlockMask>
__global__ void __launch_bounds__(BackwardDqCounters<Kernel, kBlockMask>::kThreads)
    dq_counters_kernel(const __grid_constant__ BackwardParams params) {
    BackwardDqCounters<Kernel, kBlockMask>::set(params);
}

template <class Kernel, BackwardInstance kInstance, bool kFixedOrder>
int launch_dk_dv(const BackwardPlan& plan, const BackwardParams& params, cudaStream_t stream) {
    if (plan.dk_dv.blocks == 0) return cudaSuccess;
    const auto kernel = backward_kernel<Kernel, kInstance, kFixedOrder>;
    BackwardTensorMaps maps{};
    cudaError_t error = encode<BackwardTraits<Kernel, kInstance>>(&maps, params);
    // At each launch, because the attribute holds for the current device only.
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.dk_dv.shared_bytes);
    if (error != cudaSuccess) return error;
    return for_each_part(plan, params, [&](const LaunchShape& shape, const BackwardParams& of_part) {
        kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(of_part, maps);
        return cudaGetLastError();
    });
}

// Calls do_with(instance as an integral_constant).
template <class Kernel, class DoWith>
auto with_backward_instance(int instance, const DoWith& do_with) {
    switch (static_cast<BackwardInstance>(instance)) {
        case BackwardInstance::general: return do_with(std::integral_constant<BackwardInstance, BackwardInstance::general>());
        case BackwardInstance::block_mask:
            return do_with(std::integral_constant<BackwardInstance, BackwardInstance::block_mask>());
        case BackwardInstance::ragged: return do_with(std::integral_constant<BackwardInstance, BackwardInstance::ragged>());
        case BackwardInstance::plain: break;
    }
    return do_with(std::integral_constant<BackwardInstance, BackwardInstance::plain>());
}

template <class Kernel, BackwardInstance kInstance>
KernelResources dk_dv_resources() {
    using Traits = BackwardTraits<Kernel, kInstance>;
    return {Traits::kThreads, BackwardKernel<Traits>::kSharedBytes};
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_backward(int step, int instance) {
    using Traits = sm90::BackwardTraits<Kernel>;
    switch (static_cast<BackwardStep>(step)) {
        case BackwardStep::statistics: return {SoftmaxStatisticsOf<Kernel>::kThreads, 0};
        case BackwardStep::dq_counters: return {sm90::BackwardDqCounters<Kernel, false>::kThreads, 0};
        case BackwardStep::dk_dv:
            return sm90::with_backward_instance<Kernel>(
                instance, [](auto kind) { return sm90::dk_dv_resources<Kernel, decltype(kind)::value>(); });
        case BackwardStep::dq_conversion: return {Traits::Accumulator::kWarps * 32, 0};
        case BackwardStep::dsink: return {DsinkOf<Kernel>::kThreads, 0};
        default: return {0, 0};  // no such step
    }
}

// Enqueues the kernels on `stream`. Returns the first CUDA error.
template <class Kernel>
int launch_backward(const BackwardPlan& plan, const BackwardParams& params, void* stream) {
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const auto statistics =
        plan.divides_units ? softmax_statistics_kernel<Kernel, kStatisticsParts> : softmax_statistics_kernel<Kernel>;
    int error = enqueue(statistics, plan.statistics, params, cuda_stream);
    const bool block_mask = knows_block_mask(static_cast<BackwardInstance>(plan.instance.number));
    const auto dq_counters = block_mask ? sm90::dq_counters_kernel<Kernel, true> : sm90::dq_counters_kernel<Kernel, false>;
    if (error == cudaSuccess) error = enqueue(dq_counters, plan.dq_counters, params, cuda_stream);
    if (error == cudaSuccess)
        error = sm90::with_backward_instance<Kernel>(plan.instance.number, [&](auto kind) {
            constexpr BackwardInstance kInstance = decltype(kind)::value;
            if constexpr (has_fixed_order(Kernel::config, kInstance))
                if (plan.fixed_order) return sm90::launch_dk_dv<Kernel, kInstance, true>(plan, params, cuda_stream);
            return sm90::launch_dk_dv<Kernel, kInstance, false>(plan, params, cuda_stream);
        });
    const auto conversion = plan.divides_units ? sm90::dq_accumulator_kernel<Kernel, dq_conversion_parts(Kernel::config.tile_q)>
                                               : sm90::dq_accumulator_kernel<Kernel, 1>;
    if (error == cudaSuccess) error = enqueue(conversion, plan.dq_conversion, params, cuda_stream);
    if (error == cudaSuccess) error = enqueue(dsink_kernel<Kernel>, plan.dsink, params, cuda_stream);
    return error;
}

}  // namespace libflash::cuda
