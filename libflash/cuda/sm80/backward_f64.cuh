// Backward in float64: softmax statistics, dK and dV, dQ, dsink, dbias. There is no dQ accumulator: the kernel for dQ recomputes
// S and dP, so the order of all additions is fixed. One instance with all options.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/params.h"
#include "cuda/sm80/dk_dv_f64.cuh"
#include "cuda/sm80/dq_f64.cuh"
#include "cuda/sm80/statistics_f64.cuh"

namespace libflash::cuda::sm80 {

template <class Kernel>
using DoubleDkDvOf = DoubleDkDv<Kernel::config.head_dim, Kernel::config.tile_q, Kernel::config.tile_k>;
template <class Kernel>
using DoubleDqOf = DoubleDq<Kernel::config.head_dim>;

template <class Kernel>
__global__ void __launch_bounds__(DoubleStatisticsUnit::kThreads)
    softmax_statistics_kernel(const __grid_constant__ BackwardParams params) {
    DoubleStatisticsUnit unit{params, {}, {}};
    unit.run();
}

template <class Kernel>
__global__ void __launch_bounds__(kDoubleThreads, 2) dk_dv_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(128) char shared[];
    DoubleDkDvOf<Kernel> body(params, shared);
    body.run();
}

template <class Kernel>
__global__ void __launch_bounds__(kDoubleThreads, 2) dq_or_dbias_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(128) char shared[];
    DoubleDqOf<Kernel> body(params, shared);
    body.run();
}

template <class Kernel>
__global__ void __launch_bounds__(DoubleDsink::kThreads) dsink_kernel(const __grid_constant__ BackwardParams params) {
    DoubleDsink::run(params);
}

// Enqueues `kernel` after raising its limit of dynamic shared memory. Does nothing without thread blocks.
inline int enqueue_double(void (*kernel)(BackwardParams), const LaunchShape& shape, const BackwardParams& params,
                          cudaStream_t stream) {
    if (shape.blocks == 0) return cudaSuccess;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(params);
    return cudaGetLastError();
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_backward(int step, int) {
    switch (static_cast<BackwardStep>(step)) {
        case BackwardStep::statistics: return {sm80::DoubleStatisticsUnit::kThreads, 0};
        case BackwardStep::dsink: return {sm80::DoubleDsink::kThreads, 0};
        case BackwardStep::dk_dv: return {sm80::kDoubleThreads, sm80::DoubleDkDvOf<Kernel>::kSharedBytes};
        default: return {sm80::kDoubleThreads, sm80::DoubleDqOf<Kernel>::kSharedBytes};
    }
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_backward(const BackwardPlan& plan, BackwardParams params, void* stream) {
    using sm80::enqueue_double;
    const auto on = static_cast<cudaStream_t>(stream);
    params.part.end_row = INT32_MAX;  // dK and dV have one launch
    BackwardParams without_bias = params;
    without_bias.dbias.data = nullptr;
    int error = enqueue_double(sm80::softmax_statistics_kernel<Kernel>, plan.statistics, params, on);
    if (error == cudaSuccess) error = enqueue_double(sm80::dk_dv_kernel<Kernel>, plan.dk_dv, params, on);
    if (error == cudaSuccess) error = enqueue_double(sm80::dq_or_dbias_kernel<Kernel>, plan.dq, without_bias, on);
    if (error == cudaSuccess) error = enqueue_double(sm80::dsink_kernel<Kernel>, plan.dsink, params, on);
    if (error == cudaSuccess) error = enqueue_double(sm80::dq_or_dbias_kernel<Kernel>, plan.dbias, params, on);
    return error;
}

}  // namespace libflash::cuda
