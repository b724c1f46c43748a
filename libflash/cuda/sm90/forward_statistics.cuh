// Forward with statistics of rows for sm_90a, without rare options: three instances (forward_instance.h).
#pragma once

#include "cuda/attention/start_head_maxima.cuh"
#include "cuda/sm90/forward.cuh"

namespace libflash::cuda::sm90 {

// Calls do_with(instance as an integral_constant).
template <class DoWith>
auto with_statistics_instance(int instance, const DoWith& do_with) {
    switch (static_cast<ForwardInstance>(instance)) {
        case ForwardInstance::maxima: return do_with(std::integral_constant<ForwardInstance, ForwardInstance::maxima>());
        case ForwardInstance::entropy: return do_with(std::integral_constant<ForwardInstance, ForwardInstance::entropy>());
        default: return do_with(std::integral_constant<ForwardInstance, ForwardInstance::statistics>());
    }
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward_statistics(int step, int instance) {
    switch (static_cast<ForwardStep>(step)) {
        case ForwardStep::order: return {sm90::kOrderThreads, 0};
        case ForwardStep::head_maxima: return {kHeadMaximaThreads, 0};
        case ForwardStep::attention: break;
    }
    return sm90::with_statistics_instance(instance,
                                          [](auto kind) { return sm90::forward_resources<Kernel, decltype(kind)::value>(); });
}

// Enqueues the kernels on `stream`. Returns a CUDA error.
template <class Kernel>
int launch_forward_statistics(const ForwardPlan& plan, const ForwardStatisticsParams& params, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    start_head_maxima<Kernel>(plan.head_maxima, params.head_maxima, params, on);
    if (plan.attention.blocks == 0) return cudaGetLastError();
    return sm90::with_statistics_instance(
        plan.instance.number, [&](auto kind) { return sm90::launch_instance<Kernel, decltype(kind)::value>(plan, params, on); });
}

}  // namespace libflash::cuda
