// The tangent of forward for sm_90a, alone from saved out and LSE or together with out and LSE: the kernel's entry and its
// launch. Persistent thread blocks compute one work tile after another: a producer warp finds work tiles and loads Q, K, V and
// their tangents by TMA, consumer warpgroups compute.
#pragma once

#include "cuda/attention/launch_dependent.cuh"
#include "cuda/params.h"
#include "cuda/sm90/forward_tangent_consumer.cuh"
#include "cuda/sm90/forward_tangent_producer.cuh"
#include "cuda/sm90/forward_tangent_wide_consumer.cuh"
#include "cuda/sm90/forward_tangent_wide_producer.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

// The parts of a kernel.
template <class Traits>
struct ForwardTangentParts {
    using Storage = ForwardTangentStorage<Traits>;
    using Tiles = ForwardTangentSharedTiles<Traits>;
    using Context = ForwardTangentContext<Traits>;
    using Producer = ForwardTangentProducer<Traits>;
    using Consumer = ForwardTangentConsumer<Traits>;
};
template <class Kernel>
struct ForwardTangentParts<ForwardTangentWideTraits<Kernel>> {
    using Traits = ForwardTangentWideTraits<Kernel>;
    using Storage = ForwardTangentWideStorage<Traits>;
    using Tiles = ForwardTangentWideTiles<Traits>;
    using Context = ForwardTangentWideContext<Traits>;
    using Producer = ForwardTangentWideProducer<Traits>;
    using Consumer = ForwardTangentWideConsumer<Traits>;
};

template <class Traits>
struct ForwardTangentKernel {
    using Parts = ForwardTangentParts<Traits>;
    static constexpr int kSharedBytes =
        shared_bytes_of_kernel<typename Parts::Storage, typename Parts::Tiles, Traits::QTile::kAlignment>();
    static_assert(kSharedBytes - Traits::kTileBytes <= Traits::kStorageBytes, "the tiles may have the rest");

    const typename Parts::Context& context;
    const typename Parts::Producer producer{context};
    const typename Parts::Consumer consumer{context};

    __device__ __forceinline__ void run() const {
        if (threadIdx.x == 0) prepare();
        if constexpr (!Traits::kWide) clear_absent_tangents();
        __syncthreads();
        run_roles<Traits>(producer, consumer);
    }

private:
    __device__ __forceinline__ void prepare() const {
        tma_prefetch_map(context.maps.q);
        tma_prefetch_map(context.maps.tq);
        tma_prefetch_map(context.maps.k);
        tma_prefetch_map(context.maps.tk);
        tma_prefetch_map(context.maps.v);
        tma_prefetch_map(context.maps.tv);
        context.storage.init();
    }
    // A tangent that is absent is zero: its tiles are never loaded. Products without branches are faster.
    __device__ __forceinline__ void clear_absent_tangents() const {
        const ForwardTangentParams& params = context.params;
        if (params.tq.data && params.tk.data && params.tv.data) return;
        if (!params.tq.data) write_zeros(context.tiles.tq(0), Traits::kGroups * Traits::QTile::kBytes);
        for (int stage = 0; stage < Traits::kStages; ++stage) {
            constexpr int kChunkBytes = Traits::KeysTile::kChunkBytes, kHalfChunk = kChunkBytes / 2;
            for (int chunk = 0; !params.tk.data && chunk < Traits::KeysTile::kChunks; ++chunk)
                write_zeros(context.tiles.keys(stage) + chunk * kChunkBytes + kHalfChunk, kHalfChunk);
            if (!params.tv.data) write_zeros(context.tiles.tv(stage), Traits::VTile::kBytes);
        }
        fence_shared_for_async();
    }
    __device__ static __forceinline__ void write_zeros(uint32_t address, int bytes) {
        for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes; at += Traits::kThreads * 16) store_zeros_16(address + at);
    }
};

// A kernel without the fused instance has more than 128 channels of V, and other traits.
template <class Kernel, TangentInstance kInstance>
using ForwardTangentTraitsOf = std::conditional_t<is_fused_with_forward(Kernel::config), ForwardTangentTraits<Kernel, kInstance>,
                                                  ForwardTangentWideTraits<Kernel>>;

template <class Kernel, TangentInstance kInstance>
__global__ void __launch_bounds__(ForwardTangentTraitsOf<Kernel, kInstance>::kThreads, 1)
    forward_tangent_kernel(const __grid_constant__ ForwardTangentParams params,
                           const __grid_constant__ ForwardTangentTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Traits = ForwardTangentTraitsOf<Kernel, kInstance>;
    const typename ForwardTangentParts<Traits>::Context context(params, maps, Traits::QTile::align(shared));
    ForwardTangentKernel<Traits>{context}.run();
}

template <class Kernel, TangentInstance kInstance>
int launch_tangent_instance(const LaunchShape& shape, const ForwardTangentParams& params, cudaStream_t stream) {
    const auto kernel = forward_tangent_kernel<Kernel, kInstance>;
    ForwardTangentTensorMaps maps{};
    cudaError_t error = encode<ForwardTangentTraitsOf<Kernel, kInstance>>(&maps, params);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    return launch_dependent(kernel, shape.blocks, shape.threads, shape.shared_bytes, stream, false, params, maps);
}

// Calls do_with with the instance as an integral_constant.
template <class Kernel, class DoWith>
auto with_tangent_instance(int instance, const DoWith& do_with) {
    if constexpr (is_fused_with_forward(Kernel::config)) {
        if (static_cast<TangentInstance>(instance) == TangentInstance::fused)
            return do_with(std::integral_constant<TangentInstance, TangentInstance::fused>());
    }
    return do_with(std::integral_constant<TangentInstance, TangentInstance::from_lse>());
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward_tangent(int, int instance) {
    return sm90::with_tangent_instance<Kernel>(instance, [](auto kind) {
        using Traits = sm90::ForwardTangentTraitsOf<Kernel, decltype(kind)::value>;
        return KernelResources{Traits::kThreads, sm90::ForwardTangentKernel<Traits>::kSharedBytes};
    });
}

// Enqueues the kernel on `stream`. Returns a CUDA error.
template <class Kernel>
int launch_forward_tangent(const ForwardTangentPlan& plan, const ForwardTangentParams& params, void* stream) {
    return sm90::with_tangent_instance<Kernel>(plan.instance.number, [&](auto kind) {
        return sm90::launch_tangent_instance<Kernel, decltype(kind)::value>(plan.attention, params,
                                                                            static_cast<cudaStream_t>(stream));
    });
}

}  // namespace libflash::cuda
