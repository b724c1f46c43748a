// FlashAttention-2 backward for sm_80 and later: the kernels and their launches. Order: softmax statistics, dK/dV with the dQ
// accumulator, conversion of the accumulator to dq (or the deterministic dq kernel), dsink, dbias.
#pragma once

#include <type_traits>

#include "cuda/attention/backward_steps.cuh"
#include "cuda/attention/dq_accumulator.cuh"
#include "cuda/params.h"
#include "cuda/sm80/backward_wide.cuh"
#include "cuda/sm80/delta.cuh"
#include "cuda/sm80/dk_dv.cuh"
#include "cuda/sm80/dk_dv_f32.cuh"
#include "cuda/sm80/dq.cuh"

namespace libflash::cuda::sm80 {

template <class Kernel>
struct BackwardTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr bool kFloat = config.dtype == KernelType::f32_;
    template <bool kGeneral>
    using Keys = std::conditional_t<
        kFloat, FloatDkDv<config.head_dim, config.tile_q, config.tile_k, config.stages, kGeneral>,
        DkDv<std::conditional_t<kFloat, __half, T>, config.head_dim, config.tile_q, config.tile_k, config.stages, kGeneral>>;
    template <bool kGeneral>
    using Queries = Dq<T, config.head_dim, kGeneral>;
    using Accumulator = typename Keys<false>::Accumulator;
    static constexpr int kThreads = Keys<false>::kThreads;
    static constexpr int kMinBlocks = kThreads <= 128 ? 2 : 1;
    static_assert(Keys<false>::kSharedBytes ==
                      backward_shared_bytes(config.head_dim, config.tile_q, config.tile_k, config.stages, sizeof(T)),
                  "the host and the kernel must agree");
};

template <class Kernel, bool kGeneral>
__global__ void __launch_bounds__(BackwardTraits<Kernel>::kThreads, BackwardTraits<Kernel>::kMinBlocks)
    dk_dv_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(128) char shared[];
    typename BackwardTraits<Kernel>::template Keys<kGeneral> body(params, shared);
    body.run();
}

template <class Kernel>
__global__ void __launch_bounds__(BackwardTraits<Kernel>::kThreads)
    dq_accumulator_kernel(const __grid_constant__ BackwardParams params) {
    if constexpr (BackwardTraits<Kernel>::kFloat) {
        BackwardTraits<Kernel>::Accumulator::convert(params);
    } else {
        __shared__ __align__(
            128) char shared[SharedTile<BackwardTraits<Kernel>::config.tile_q, BackwardTraits<Kernel>::config.head_dim>::kBytes];
        BackwardTraits<Kernel>::Accumulator::template convert<true>(params, shared);
    }
}

template <class Kernel, bool kGeneral>
__global__ void __launch_bounds__(BackwardTraits<Kernel>::template Queries<kGeneral>::kThreads, 2)
    dq_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(128) char shared[];
    typename BackwardTraits<Kernel>::template Queries<kGeneral> body(params, shared);
    body.run();
}

template <class Kernel>
__global__ void __launch_bounds__(SoftmaxStatisticsOf<Kernel>::kThreads)
    delta_kernel(const __grid_constant__ BackwardParams params) {
    Delta<SoftmaxStatisticsOf<Kernel>> unit{{params, {}, {}}};
    unit.run(kUnitRows * Kernel::config.head_dim);
}

// The softmax statistics of the query rows. If the caller has a tensor for delta, it is written or read (delta.cuh).
template <class Kernel>
int launch_statistics(const BackwardPlan& plan, const BackwardParams& params, cudaStream_t stream) {
    int error = cudaSuccess;
    if (!params.delta.data || !params.adds) error = enqueue(softmax_statistics_kernel<Kernel>, plan.statistics, params, stream);
    if (error == cudaSuccess && params.delta.data) error = enqueue(delta_kernel<Kernel>, plan.statistics, params, stream);
    return error;
}

// dK/dV, then dq. A launch whose plan has no thread blocks does nothing.
template <class Kernel, bool kGeneral>
int launch_gradients(const BackwardPlan& plan, const BackwardParams& params, cudaStream_t stream) {
    int error = for_each_part(plan, params, [&](const LaunchShape& shape, const BackwardParams& of_part) {
        return enqueue(dk_dv_kernel<Kernel, kGeneral>, shape, of_part, stream);
    });
    if (error == cudaSuccess) error = enqueue(dq_accumulator_kernel<Kernel>, plan.dq_conversion, params, stream);
    if (error == cudaSuccess) error = enqueue(dq_kernel<Kernel, kGeneral>, plan.dq, params, stream);
    return error;
}

template <class Kernel, bool kGeneral>
KernelResources backward_resources(BackwardStep step) {
    using Keys = typename BackwardTraits<Kernel>::template Keys<kGeneral>;
    using Queries = typename BackwardTraits<Kernel>::template Queries<kGeneral>;
    switch (step) {
        case BackwardStep::statistics: return {SoftmaxStatisticsOf<Kernel>::kThreads, 0};
        case BackwardStep::dk_dv: return {Keys::kThreads, Keys::kSharedBytes};
        case BackwardStep::dq_conversion: return {BackwardTraits<Kernel>::kThreads, 0};
        case BackwardStep::dq: return {Queries::kThreads, Queries::kSharedBytes};
        case BackwardStep::dsink: return {DsinkOf<Kernel>::kThreads, 0};
        default: return {DbiasOf<Kernel>::kThreads, DbiasOf<Kernel>::kSharedBytes};
    }
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_backward(int step, int instance) {
    if constexpr (is_wide_backward(Kernel::config.head_dim)) {
        return sm80::wide_backward_resources<Kernel>(static_cast<BackwardStep>(step));
    } else {
        const auto resources = instance == kGeneralInstance.number ? sm80::backward_resources<Kernel, true>
                                                                   : sm80::backward_resources<Kernel, false>;
        return resources(static_cast<BackwardStep>(step));
    }
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_backward(const BackwardPlan& plan, const BackwardParams& params, void* stream) {
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    int error = sm80::launch_statistics<Kernel>(plan, params, cuda_stream);
    if constexpr (is_wide_backward(Kernel::config.head_dim)) {
        if (error == cudaSuccess) error = sm80::launch_wide_gradients<Kernel>(plan, params, cuda_stream);
    } else {
        const auto launch_gradients = plan.instance.number == kGeneralInstance.number ? sm80::launch_gradients<Kernel, true>
                                                                                      : sm80::launch_gradients<Kernel, false>;
        if (error == cudaSuccess) error = launch_gradients(plan, params, cuda_stream);
    }
    if (error == cudaSuccess) error = enqueue(dsink_kernel<Kernel>, plan.dsink, params, cuda_stream);
    if constexpr (!has_wide_dbias(Kernel::config.head_dim, element_bytes(Kernel::config.dtype))) {
        if (error == cudaSuccess) error = enqueue(dbias_kernel<Kernel>, plan.dbias, params, cuda_stream);
    }
    return error;
}

}  // namespace libflash::cuda
