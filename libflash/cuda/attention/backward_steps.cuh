// The steps of backward that are the same in every room, before and after the gradients of keys and values: what each query row needs, and the gradient of
// the sink. And how a step is enqueued.
#pragma once

#include "cuda/attention/element.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/row_facts.cuh"
#include "cuda/plans.h"

namespace libflash::cuda {

template <class Row>
using RowFactsOf =
    RowFactsUnit<ElementOf<Row::config.dtype>, row_facts_lanes(Row::config.head_dim, sizeof(ElementOf<Row::config.dtype>))>;
template <class Row>
using SinkGradientOf = SinkGradient<ElementOf<Row::config.dtype>>;

template <class Row>
__global__ void __launch_bounds__(RowFactsOf<Row>::kThreads) row_facts_kernel(const __grid_constant__ BackwardParams params) {
    RowFactsOf<Row> unit{params, {}, {}};
    unit.run(kUnitRows * Row::config.head_dim);
}

template <class Row>
__global__ void __launch_bounds__(SinkGradientOf<Row>::kThreads)
    sink_gradient_kernel(const __grid_constant__ BackwardParams params) {
    SinkGradientOf<Row>::run(params);
}

// Enqueues `kernel`, whose shared memory may be more than is given without asking; nothing if there are no thread blocks.
inline int enqueue(void (*kernel)(BackwardParams), const LaunchShape& shape, const BackwardParams& params, cudaStream_t stream) {
    if (shape.blocks == 0) return cudaSuccess;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(params);
    return cudaGetLastError();
}

}  // namespace libflash::cuda
