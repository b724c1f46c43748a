// The kernels of backward that all architectures share: softmax statistics of the query rows, which run before dK/dV, and the
// gradients of sink and bias. Also the launches of a step.
#pragma once

#include "cuda/attention/dbias.cuh"
#include "cuda/attention/element.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/softmax_statistics.cuh"
#include "cuda/plans.h"

#include <algorithm>

namespace libflash::cuda {

template <class Kernel, int kParts = 1>
using SoftmaxStatisticsOf = SoftmaxStatisticsUnit<ElementOf<Kernel::config.dtype>, Kernel::config.head_dim, kParts>;
template <class Kernel>
using DsinkOf = Dsink<ElementOf<Kernel::config.dtype>>;
template <class Kernel>
using DbiasOf = Dbias<ElementOf<Kernel::config.dtype>, Kernel::config.head_dim>;

// Sets to 0 what the thread blocks of dK/dV count: the work tiles that they have taken, and the splits that have ended.
__device__ __forceinline__ void clear_counters(const BackwardParams& params) {
    const SplitTilesParams& tiles = params.split_tiles;
    const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (params.next_work_tile && thread == 0) *params.next_work_tile = 0;
    for (int i = thread; i < tiles.count; i += static_cast<int>(gridDim.x * blockDim.x)) tiles.counters[i] = 0;
}

template <class Kernel, int kParts = 1>
__global__ void __launch_bounds__(SoftmaxStatisticsOf<Kernel>::kThreads)
    softmax_statistics_kernel(const __grid_constant__ BackwardParams params) {
    clear_counters(params);
    SoftmaxStatisticsOf<Kernel, kParts> unit{params, {}, {}};
    unit.run(kUnitRows * Kernel::config.head_dim);
}

template <class Kernel>
__global__ void __launch_bounds__(DsinkOf<Kernel>::kThreads) dsink_kernel(const __grid_constant__ BackwardParams params) {
    DsinkOf<Kernel>::run(params);
}

template <class Kernel>
__global__ void __launch_bounds__(DbiasOf<Kernel>::kThreads, 2) dbias_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(128) char tiles[];
    DbiasOf<Kernel> body(params, tiles);
    body.run();
}

// Enqueues `kernel` after raising its limit of dynamic shared memory, which is 48 KB by default. Does nothing without thread
// blocks.
inline int enqueue(void (*kernel)(BackwardParams), const LaunchShape& shape, const BackwardParams& params, cudaStream_t stream) {
    if (shape.blocks == 0) return cudaSuccess;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(params);
    return cudaGetLastError();
}

// Calls launch(shape, params) for each launch of the dK/dV kernel until one fails; the launches of a key tile follow each other.
// Returns the last CUDA error. part.taken_before is what the earlier launches have added to the counter of work tiles: each
// persistent thread block takes one number more than it has work tiles. Without a fixed order its first number is not from the
// counter.
template <class Launch>
int for_each_part(const BackwardPlan& plan, BackwardParams params, const Launch& launch) {
    const BackwardParts& parts = plan.parts;
    LaunchShape shape = plan.dk_dv;
    const auto group = static_cast<int32_t>(params.group_size), heads = parts.heads ? static_cast<int32_t>(parts.heads) : group;
    BackwardPart& part = params.part;
    const int64_t all = plan.work_tiles();
    for (int64_t first = 0; first < all; first += part.work_tiles) {
        const int64_t count = parts.key_tiles ? std::min(parts.key_tiles, all - first) : all;
        shape.blocks = std::min(plan.dk_dv.blocks, count);
        part.first_work_tile = static_cast<int32_t>(first);
        part.work_tiles = static_cast<int32_t>(count);
        for (int64_t i = 0; i < parts.launches; ++i) {
            const int64_t range = i % parts.of_rows;
            part.first = i == 0, part.last = i + 1 == parts.launches;
            part.first_head = static_cast<int32_t>(i / parts.of_rows) * heads;
            part.heads = std::min(heads, group - part.first_head);
            part.first_row = static_cast<int32_t>(range * parts.rows);
            part.end_row = range + 1 == parts.of_rows ? INT32_MAX : static_cast<int32_t>((range + 1) * parts.rows);
            const int error = launch(shape, params);
            if (error != cudaSuccess) return error;
            part.taken_before += static_cast<int32_t>(count + (plan.fixed_order ? shape.blocks : 0));
        }
    }
    return cudaSuccess;
}

}  // namespace libflash::cuda
