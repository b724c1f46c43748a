// Backward for sm_90a with more than 256 channels: after the softmax statistics, one kernel for each gradient, whose thread
// blocks have 64 rows of one head and visit the tiles of the other side. No thread block adds to global memory, so the order of
// all additions is fixed. Each kernel recomputes the scores: 8 products instead of 5. Two consumer warpgroups have half of the
// channels each (backward_wide_consumer.cuh); two warps load (backward_wide_producer.cuh).
#pragma once

#include "cuda/attention/backward_steps.cuh"
#include "cuda/params.h"
#include "cuda/sm90/backward_wide_consumer.cuh"
#include "cuda/sm90/backward_wide_producer.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardWideBlock {
    static constexpr int kSharedBytes =
        shared_bytes_of_kernel<BackwardWideStorage<Traits>, BackwardWideTiles<Traits>, Traits::Tile::kAlignment>();

    const BackwardWideContext<Traits>& context;
    const BackwardWideProducer<Traits> producer{context};
    const BackwardWideConsumer<Traits> consumer{context};

    __device__ __forceinline__ void run() const {
        TileCoordinates at;
        SequenceRows rows;
        const int first = Traits::kKeys ? context.params.part.first_work_tile : 0;
        if (!BackwardWideWorkTile<Traits>::find(context.params, first + static_cast<int>(blockIdx.x), at, rows)) return;
        if (threadIdx.x == 0) {
            context.storage.init();
            context.storage.work_tile.init(context.params, at, rows);
        }
        __syncthreads();
        run_roles<Traits>(producer, consumer);
    }
};

template <class Kernel, WideGradient kOutput>
__global__ void __launch_bounds__(BackwardWideTraits<Kernel, kOutput>::kThreads, 1)
    backward_wide_kernel(const __grid_constant__ BackwardParams params, const __grid_constant__ BackwardWideTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Traits = BackwardWideTraits<Kernel, kOutput>;
    const BackwardWideContext<Traits> context(params, maps, Traits::Tile::align(shared));
    BackwardWideBlock<Traits>{context}.run();
}

template <class Kernel, WideGradient kOutput>
int launch_wide_gradient(const LaunchShape& shape, const BackwardParams& params, cudaStream_t stream) {
    if (shape.blocks == 0) return cudaSuccess;
    const auto kernel = backward_wide_kernel<Kernel, kOutput>;
    BackwardWideTensorMaps maps{};
    cudaError_t error = encode<BackwardWideTraits<Kernel, kOutput>>(&maps, params);
    // At each launch, because the attribute holds for the current device only.
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(params, maps);
    return cudaGetLastError();
}

template <class Kernel, WideGradient kOutput>
KernelResources wide_gradient_resources() {
    using Traits = BackwardWideTraits<Kernel, kOutput>;
    return {Traits::kThreads, BackwardWideBlock<Traits>::kSharedBytes};
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_backward_wide(int step, int) {
    using sm90::WideGradient;
    switch (static_cast<BackwardStep>(step)) {
        case BackwardStep::statistics: return {SoftmaxStatisticsOf<Kernel>::kThreads, 0};
        case BackwardStep::dk_dv: {
            const KernelResources dv = sm90::wide_gradient_resources<Kernel, WideGradient::dv>(),
                                  dk = sm90::wide_gradient_resources<Kernel, WideGradient::dk>();
            return {dk.threads, std::max(dk.shared_bytes, dv.shared_bytes)};
        }
        case BackwardStep::dq: return sm90::wide_gradient_resources<Kernel, WideGradient::dq>();
        case BackwardStep::dsink: return {DsinkOf<Kernel>::kThreads, 0};
        default: return {0, 0};  // no such step
    }
}

// Enqueues the kernels on `stream`. Returns the first CUDA error.
template <class Kernel>
int launch_backward_wide(const BackwardPlan& plan, const BackwardParams& params, void* stream) {
    using sm90::WideGradient, sm90::launch_wide_gradient;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    int error = enqueue(softmax_statistics_kernel<Kernel>, plan.statistics, params, cuda_stream);
    if (error == cudaSuccess)
        error = for_each_part(plan, params, [&](const LaunchShape& shape, const BackwardParams& of_part) {
            const int of_dv = launch_wide_gradient<Kernel, WideGradient::dv>(shape, of_part, cuda_stream);
            return of_dv == cudaSuccess ? launch_wide_gradient<Kernel, WideGradient::dk>(shape, of_part, cuda_stream) : of_dv;
        });
    if (error == cudaSuccess) error = launch_wide_gradient<Kernel, WideGradient::dq>(plan.dq, params, cuda_stream);
    if (error == cudaSuccess) error = enqueue(dsink_kernel<Kernel>, plan.dsink, params, cuda_stream);
    return error;
}

}  // namespace libflash::cuda
