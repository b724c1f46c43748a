// Forward for sm_90a with more than 256 channels. A thread block has one query tile of one head: two consumer warpgroups with the
// same 64 rows and half of the channels of O each (forward_wide_consumer.cuh), and two warps that load
// (forward_wide_producer.cuh).
#pragma once

#include "cuda/attention/launch_dependent.cuh"
#include "cuda/params.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/forward_wide_consumer.cuh"
#include "cuda/sm90/forward_wide_producer.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardWideBlock {
    static constexpr int kSharedBytes =
        shared_bytes_of_kernel<ForwardWideStorage<Traits>, ForwardWideTiles<Traits>, Traits::QTile::kAlignment>();

    const ForwardWideContext<Traits>& context;
    const ForwardWideProducer<Traits> producer{context};
    const ForwardWideConsumer<Traits> consumer{context};

    __device__ __forceinline__ void run() const {
        if (threadIdx.x == 0) {
            tma_prefetch_map(context.maps.q);
            tma_prefetch_map(context.maps.k);
            tma_prefetch_map(context.maps.v);
            context.storage.init();
        }
        wait_for_previous_kernel();
        allow_next_kernel();
        if (find_work_tile()) run_roles<Traits>(producer, consumer);
    }

private:
    // Returns false if there is no work tile with this number.
    __device__ __forceinline__ bool find_work_tile() const {
        const ForwardParams& params = context.params;
        const int index = params.first_work_tile + static_cast<int>(blockIdx.x);
        const TileCoordinates work = tile_coordinates<Traits::kBlockM>(params.schedule, params.q_lengths, params.batch, index);
        if (work.batch < 0) return false;
        const SequenceRows rows = SequenceRows::of(params.q_lengths, work.batch);
        if (work.tile * Traits::kBlockM >= rows.owned) return false;
        if (threadIdx.x == 0) context.storage.work_tile.init(params, work, rows);
        __syncthreads();
        return true;
    }
};

template <class Kernel>
__global__ void __launch_bounds__(ForwardWideTraits<Kernel>::kThreads, 1)
    forward_wide_kernel(const __grid_constant__ ForwardParams params, const __grid_constant__ ForwardTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Traits = ForwardWideTraits<Kernel>;
    const ForwardWideContext<Traits> context(params, maps, Traits::QTile::align(shared));
    ForwardWideBlock<Traits>{context}.run();
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward_wide(int, int) {
    using Traits = sm90::ForwardWideTraits<Kernel>;
    return {Traits::kThreads, sm90::ForwardWideBlock<Traits>::kSharedBytes};
}

// Enqueues the kernel on `stream`, in several launches if the workspace for long sums is smaller than the grid. Returns a CUDA
// error.
template <class Kernel>
int launch_forward_wide(const ForwardPlan& plan, ForwardParams params, void* stream) {
    const LaunchShape& shape = plan.attention;
    const auto kernel = sm90::forward_wide_kernel<Kernel>;
    sm90::ForwardTensorMaps maps{};
    int error = sm90::encode<sm90::ForwardWideTraits<Kernel>>(&maps, params);
    // At each launch, because the attribute holds for the current device only.
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    const int64_t at_once = plan.blocks_at_once > 0 ? plan.blocks_at_once : shape.blocks;
    for (int64_t first = 0; first < shape.blocks && error == cudaSuccess; first += at_once) {
        params.first_work_tile = static_cast<int32_t>(first);
        const int64_t blocks = shape.blocks - first < at_once ? shape.blocks - first : at_once;
        error = launch_dependent(kernel, blocks, shape.threads, shape.shared_bytes, static_cast<cudaStream_t>(stream), true,
                                 params, maps);
    }
    return error;
}

}  // namespace libflash::cuda
