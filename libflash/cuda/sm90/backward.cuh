// FlashAttention-3 backward for sm_90a (Shah and others, arXiv 2407.08608). Its kernels compute the softmax statistics, then dK,
// dV and the dQ accumulator, then dQ from the accumulator, then the gradients of sink and bias. In the second one a thread block
// has one key tile. Its warpgroups: the first loads tiles (backward_producer.cuh), the second computes the dQ accumulator
// (backward_dq.cuh). The other two have 64 keys each (backward_dk_dv.cuh, backward_wide.cuh, backward_general.cuh), or divide the
// products of 64 keys (backward_divided.cuh).
#pragma once

#include "cuda/attention/backward_steps.cuh"
#include "cuda/attention/launch_dependent.cuh"
#include "cuda/params.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/backward_kernel.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

template <class Kernel>
__global__ void __launch_bounds__(SoftmaxStatisticsOf<Kernel>::kThreads)
    statistics_kernel(const __grid_constant__ BackwardParams params) {
    wait_for_previous_kernel();
    allow_next_kernel();
    if (params.next_work_tile && blockIdx.x == 0 && threadIdx.x == 0) *params.next_work_tile = 0;
    SoftmaxStatisticsOf<Kernel> unit{params, {}, {}};
    unit.run(kUnitRows * Kernel::config.head_dim);
    if (params.dq_counters && unit.work.batch >= 0) BackwardDqCounters<Kernel>{params, unit.work, unit.rows}.set();
}

template <class Kernel, BackwardInstance kInstance>
__global__ void __launch_bounds__(BackwardTraits<Kernel, kInstance>::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params, const __grid_constant__ BackwardTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Traits = BackwardTraits<Kernel, kInstance>;
    const BackwardContext<Traits> context(params, maps, Traits::QTile::align(shared));
    BackwardKernel<Traits>{context}.run();
}

template <class Kernel>
__global__ void __launch_bounds__(BackwardTraits<Kernel>::Accumulator::kWarps * 32)
    dq_accumulator_kernel(const __grid_constant__ BackwardParams params) {
    using Traits = BackwardTraits<Kernel>;
    wait_for_previous_kernel();
    allow_next_kernel();
    __shared__ __align__(128) char shared[SharedTile<Traits::kBlockM, Traits::kHeadDim>::kBytes];
    Traits::Accumulator::convert(params, shared);
}

// Enqueues a kernel that may begin before the previous one has ended. Does nothing without thread blocks.
inline int enqueue_dependent(void (*kernel)(BackwardParams), const LaunchShape& shape, const BackwardParams& params,
                             cudaStream_t stream) {
    if (shape.blocks == 0) return cudaSuccess;
    return launch_dependent(kernel, shape.blocks, shape.threads, shape.shared_bytes, stream, true, params);
}

template <class Kernel, BackwardInstance kInstance>
int launch_dk_dv(const BackwardPlan& plan, const BackwardParams& params, cudaStream_t stream) {
    if (plan.dk_dv.blocks == 0) return cudaSuccess;
    const auto kernel = backward_kernel<Kernel, kInstance>;
    BackwardTensorMaps maps{};
    cudaError_t error = encode<BackwardTraits<Kernel, kInstance>>(&maps, params);
    // At each launch, because the attribute holds for the current device only.
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.dk_dv.shared_bytes);
    if (error != cudaSuccess) return error;
    return for_each_part(plan, params, [&](const LaunchShape& shape, const BackwardParams& of_part) {
        return launch_dependent(kernel, shape.blocks, shape.threads, shape.shared_bytes, stream, true, of_part, maps);
    });
}

// Calls do_with with the instance as an integral_constant.
template <class Kernel, class DoWith>
auto with_backward_instance(int instance, const DoWith& do_with) {
    switch (static_cast<BackwardInstance>(instance)) {
        case BackwardInstance::general:
            if constexpr (has_general_backward(Kernel::config))
                return do_with(std::integral_constant<BackwardInstance, BackwardInstance::general>());
            break;
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
        case BackwardStep::dk_dv:
            return sm90::with_backward_instance<Kernel>(
                instance, [](auto kind) { return sm90::dk_dv_resources<Kernel, decltype(kind)::value>(); });
        case BackwardStep::dq_conversion: return {Traits::Accumulator::kWarps * 32, 0};
        case BackwardStep::dsink: return {DsinkOf<Kernel>::kThreads, 0};
        case BackwardStep::dbias: return {DbiasOf<Kernel>::kThreads, DbiasOf<Kernel>::kSharedBytes};
        default: return {0, 0};  // no such step
    }
}

// Enqueues the kernels on `stream`. Returns the first CUDA error.
template <class Kernel>
int launch_backward(const BackwardPlan& plan, const BackwardParams& params, void* stream) {
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    int error = sm90::enqueue_dependent(sm90::statistics_kernel<Kernel>, plan.statistics, params, cuda_stream);
    if (error == cudaSuccess)
        error = sm90::with_backward_instance<Kernel>(plan.instance.number, [&](auto kind) {
            return sm90::launch_dk_dv<Kernel, decltype(kind)::value>(plan, params, cuda_stream);
        });
    if (error == cudaSuccess)
        error = sm90::enqueue_dependent(sm90::dq_accumulator_kernel<Kernel>, plan.dq_conversion, params, cuda_stream);
    if (error == cudaSuccess) error = enqueue(dsink_kernel<Kernel>, plan.dsink, params, cuda_stream);
    if (error == cudaSuccess) error = enqueue(dbias_kernel<Kernel>, plan.dbias, params, cuda_stream);
    return error;
}

}  // namespace libflash::cuda
