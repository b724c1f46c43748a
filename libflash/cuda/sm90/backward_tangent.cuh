// The tangent of backward for sm_90a: statistics of the query rows, a kernel for tdq whose thread blocks have tiles of queries, a
// kernel for tdk and tdv whose thread blocks have tiles of keys, then tdsink. Each kernel computes all scores, so that all sums
// stay in registers and are added in a fixed order. Persistent thread blocks compute one work tile after another: a producer warp
// finds work tiles and loads by TMA, two consumer warpgroups compute.
#pragma once

#include "cuda/attention/tangent_statistics.cuh"
#include "cuda/params.h"
#include "cuda/sm90/backward_tangent_consumer.cuh"
#include "cuda/sm90/backward_tangent_instance.h"
#include "cuda/sm90/backward_tangent_producer.cuh"
#include "cuda/sm90/backward_tangent_wide_consumer.cuh"
#include "cuda/sm90/backward_tangent_wide_traits.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardTangentKernel {
    static constexpr int kSharedBytes =
        shared_bytes_of_kernel<BackwardTangentStorage<Traits>, BackwardTangentSharedTiles<Traits>, Traits::RowTile::kAlignment>();
    static_assert(kSharedBytes - Traits::kTileBytes <= Traits::kStorageBytes, "the tiles may have the rest");
    static constexpr bool kKeys = Traits::kKeys;
    using Consumer = std::conditional_t<Traits::kWide, BackwardTangentWideConsumer<Traits>, BackwardTangentConsumer<Traits>>;

    const BackwardTangentContext<Traits>& context;
    const BackwardTangentProducer<Traits> producer{context};
    const Consumer consumer{context};

    __device__ __forceinline__ void run() const {
        if (threadIdx.x == 0) prepare();
        clear_absent_tangents();
        __syncthreads();
        run_roles<Traits>(producer, consumer);
    }

private:
    __device__ __forceinline__ void prepare() const {
        for (const TangentSideMaps* side : {&context.maps.rows, &context.maps.cols})
            for (const CUtensorMap* map : {&side->first, &side->tfirst, &side->second, &side->tsecond}) tma_prefetch_map(*map);
        context.storage.init();
    }
    // Absent tangents are zero: their tiles are cleared once and never loaded. Products without branches are faster.
    __device__ __forceinline__ void clear_absent_tangents() const {
        const BackwardTangentParams& params = context.params;
        const bool tq = params.tq.data, tk = params.tk.data, tv = params.tv.data, tdout = params.tdout.data;
        if (!(kKeys ? tk : tq)) clear_rows(1);
        if (Traits::kMovingRows && !(kKeys ? tv : tdout)) clear_rows(3);
        for (int stage = 0; stage < Traits::kStages; ++stage) {
            if (!(kKeys ? tq : tk)) clear_second_half<typename Traits::ColTile>(context.tiles.first_cols(stage));
            if (Traits::kMovingCols && !(kKeys ? tdout : tv))
                clear_second_half<typename Traits::SecondColTile>(context.tiles.second_cols(stage));
        }
        fence_shared_for_async();
    }
    __device__ __forceinline__ void clear_rows(int tensor) const {
        write_zeros(context.tiles.rows(tensor, 0), Traits::kGroups * Traits::RowTile::kBytes);
    }
    template <class Tile>
    __device__ static __forceinline__ void clear_second_half(uint32_t tile) {
        constexpr int kHalf = Tile::kChunkBytes / 2;
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk) write_zeros(tile + chunk * Tile::kChunkBytes + kHalf, kHalf);
    }
    __device__ static __forceinline__ void write_zeros(uint32_t address, int bytes) {
        for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes; at += Traits::kThreads * 16) store_zeros_16(address + at);
    }
};

template <class Kernel>
__global__ void __launch_bounds__(TangentStatisticsUnit<ElementOf<Kernel::config.dtype>>::kThreads)
    tangent_statistics_kernel(const __grid_constant__ BackwardTangentParams params) {
    TangentStatisticsUnit<ElementOf<Kernel::config.dtype>> unit{params, {}, {}};
    unit.run();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_tangent_kernel(const __grid_constant__ BackwardTangentParams params,
                            const __grid_constant__ BackwardTangentTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    const BackwardTangentContext<Traits> context(params, maps, Traits::RowTile::align(shared));
    BackwardTangentKernel<Traits>{context}.run();
}

template <class Kernel>
__global__ void __launch_bounds__(TangentDsink<ElementOf<Kernel::config.dtype>>::kThreads)
    tangent_dsink_kernel(const __grid_constant__ BackwardTangentParams params) {
    TangentDsink<ElementOf<Kernel::config.dtype>>::run(params);
}

inline int enqueue_step(void (*kernel)(BackwardTangentParams), const LaunchShape& shape, const BackwardTangentParams& params,
                        cudaStream_t stream) {
    if (shape.blocks == 0) return cudaSuccess;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(params);
    return cudaGetLastError();
}

template <class Traits>
int enqueue_gradients(const LaunchShape& shape, const BackwardTangentParams& params, cudaStream_t stream) {
    if (shape.blocks == 0) return cudaSuccess;
    constexpr int kSharedBytes = BackwardTangentKernel<Traits>::kSharedBytes;
    const auto kernel = backward_tangent_kernel<Traits>;
    BackwardTangentTensorMaps maps{};
    cudaError_t error = encode<Traits>(&maps, params);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, kSharedBytes, stream>>>(params, maps);
    return cudaGetLastError();
}

template <class Traits>
KernelResources resources_of() {
    return {Traits::kThreads, BackwardTangentKernel<Traits>::kSharedBytes};
}
template <class Kernel, bool kKeys>
KernelResources gradient_resources(int instance) {
    const bool moving = instance == kMovingDoutInstance.number;
    if constexpr (has_kernel_for_each_gradient(Kernel::config)) {
        constexpr TangentGradient kGradient = kKeys ? TangentGradient::tdk : TangentGradient::tdq;
        return moving ? resources_of<BackwardTangentWideTraits<Kernel, kGradient, true>>()
                      : resources_of<BackwardTangentWideTraits<Kernel, kGradient, false>>();
    } else {
        return moving ? resources_of<BackwardTangentTraits<Kernel, kKeys, true>>()
                      : resources_of<BackwardTangentTraits<Kernel, kKeys, false>>();
    }
}

template <class Kernel, bool kMoving>
int enqueue_all_gradients(const BackwardTangentPlan& plan, const BackwardTangentParams& params, cudaStream_t stream) {
    if constexpr (has_kernel_for_each_gradient(Kernel::config)) {
        using Gradient = TangentGradient;
        int error = enqueue_gradients<BackwardTangentWideTraits<Kernel, Gradient::tdq, kMoving>>(plan.tdq, params, stream);
        if (error == cudaSuccess)
            error = enqueue_gradients<BackwardTangentWideTraits<Kernel, Gradient::tdk, kMoving>>(plan.tdk_tdv, params, stream);
        if (error == cudaSuccess)
            error = enqueue_gradients<BackwardTangentWideTraits<Kernel, Gradient::tdv, kMoving>>(plan.tdk_tdv, params, stream);
        return error;
    } else {
        const int error = enqueue_gradients<BackwardTangentTraits<Kernel, false, kMoving>>(plan.tdq, params, stream);
        if (error != cudaSuccess) return error;
        return enqueue_gradients<BackwardTangentTraits<Kernel, true, kMoving>>(plan.tdk_tdv, params, stream);
    }
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_backward_tangent(int step, int instance) {
    using T = ElementOf<Kernel::config.dtype>;
    switch (static_cast<BackwardTangentStep>(step)) {
        case BackwardTangentStep::statistics: return {TangentStatisticsUnit<T>::kThreads, 0};
        case BackwardTangentStep::gradients: return sm90::gradient_resources<Kernel, false>(instance);
        case BackwardTangentStep::gradients_of_keys: return sm90::gradient_resources<Kernel, true>(instance);
        case BackwardTangentStep::dsink: return {TangentDsink<T>::kThreads, 0};
        default: return {0, 0};  // no such step
    }
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_backward_tangent(const BackwardTangentPlan& plan, const BackwardTangentParams& params, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    int error = sm90::enqueue_step(sm90::tangent_statistics_kernel<Kernel>, plan.statistics, params, on);
    if (error == cudaSuccess) {
        error = plan.instance.number == kMovingDoutInstance.number ? sm90::enqueue_all_gradients<Kernel, true>(plan, params, on)
                                                                   : sm90::enqueue_all_gradients<Kernel, false>(plan, params, on);
    }
    if (error == cudaSuccess) error = sm90::enqueue_step(sm90::tangent_dsink_kernel<Kernel>, plan.dsink, params, on);
    return error;
}

}  // namespace libflash::cuda
