// Forward with statistics of rows: one instance of forward.cuh with all options; it uses long sums only if the call needs them. A
// warp has 16 rows, so that registers suffice for the statistics; with 256 channels and 16-bit types, and with more than 256
// channels, two warps share these rows.
#pragma once

#include "cuda/attention/start_head_maxima.cuh"
#include "cuda/sm80/forward.cuh"

namespace libflash::cuda::sm80 {

template <class Kernel>
struct StatisticsInstance {
    static constexpr KernelConfig config = Kernel::config;
    static constexpr int kSharers = forward_sharers(config, true), kWarps = config.tile_q / 16 * kSharers;
    static constexpr int kMinBlocks = kWarps <= 4 ? 2 : 1;
    using Body = Forward<ElementOf<config.dtype>, config.head_dim, config.tile_q, config.tile_k, kWarps, kSharers, true,
                         has_long_sums(config), true>;
    static constexpr bool shared_memory_fits() {  // the host computes the size only for wide heads
        if constexpr (is_wide_forward(config))
            return Body::kSharedBytes + Body::Pair::kStaticBytes <= wide_forward_shared_bytes(config);
        return true;
    }
    static_assert(shared_memory_fits(), "the host and the kernel must agree");
};

template <class Kernel>
__global__ void __launch_bounds__(StatisticsInstance<Kernel>::Body::kThreads, StatisticsInstance<Kernel>::kMinBlocks)
    forward_statistics_kernel(const __grid_constant__ ForwardStatisticsParams params) {
    extern __shared__ __align__(128) char shared[];
    typename StatisticsInstance<Kernel>::Body body(params, shared);
    body.run();
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward_statistics(int step, int) {
    using Body = typename sm80::StatisticsInstance<Kernel>::Body;
    if (static_cast<ForwardStep>(step) == ForwardStep::head_maxima) return {kHeadMaximaThreads, 0};
    return {Body::kThreads, Body::kSharedBytes};
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_forward_statistics(const ForwardPlan& plan, const ForwardStatisticsParams& call, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    ForwardStatisticsParams params = call;
    start_head_maxima<Kernel>(plan.head_maxima, params.head_maxima, params, on);
    const LaunchShape& shape = plan.attention;
    if (shape.blocks == 0) return cudaGetLastError();
    const auto kernel = sm80::forward_statistics_kernel<Kernel>;
    // Set at every launch, because the attribute belongs to the current device.
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    const int64_t at_once = plan.blocks_at_once > 0 ? plan.blocks_at_once : shape.blocks;
    for (int64_t first = 0; first < shape.blocks; first += at_once) {
        const int64_t blocks = shape.blocks - first < at_once ? shape.blocks - first : at_once;
        params.first_work_tile = static_cast<int32_t>(first);
        kernel<<<static_cast<unsigned>(blocks), shape.threads, shape.shared_bytes, on>>>(params);
    }
    return cudaGetLastError();
}

}  // namespace libflash::cuda
