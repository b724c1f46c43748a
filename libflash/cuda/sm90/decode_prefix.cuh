// Decode for sm_90a: the keys that sequences of a group share. The decode kernel of sm80 continues from the sums. This kernel
// replaces sm80/decode_prefix.cuh, with the same rows, keys and bits, but uses wgmma.
//
// A thread block has 64 or 128 rows of whole sequences and one class of the keys of a split (sm80/decode_prefix.cuh says what a
// class is): a consumer warpgroup for each 64 rows (decode_prefix_consumer.cuh) and a producer (decode_prefix_producer.cuh).
#pragma once

#include "cuda/attention/launch_dependent.cuh"
#include "cuda/params.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/decode_prefix_consumer.cuh"
#include "cuda/sm90/decode_prefix_producer.cuh"
#include "cuda/sm90/extent.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodePrefixBlock {
    static constexpr int kSharedBytes =
        shared_bytes_of_kernel<DecodePrefixStorage<Traits>, DecodePrefixTiles<Traits>, Traits::KTile::kAlignment>();

    const DecodePrefixContext<Traits>& context;

    __device__ __forceinline__ void run() const {
        if (threadIdx.x == 0) {
            tma_prefetch_map(context.maps.k);
            context.storage.init();
        }
        wait_for_previous_kernel();
        allow_next_kernel();
        if (!find_work_tile()) return;
        run_roles<Traits>(DecodePrefixProducer<Traits>{context}, DecodePrefixConsumer<Traits>{context});
    }

private:
    // Consecutive thread blocks have the classes of a key head; then follow heads, tiles and splits. So the keys of a split are
    // read at about the same time. Returns false if there is no such tile, or if its rows see no shared key.
    __device__ __forceinline__ bool find_work_tile() const {
        const DecodeParams& params = context.params;
        const int classes = params.shared.classes, index = static_cast<int>(blockIdx.x), head_of_all = index / classes;
        const int split_tile = divide(head_of_all, params.by_heads), head = head_of_all - split_tile * params.heads_k;
        const int split = split_tile / params.shared.tiles, number = split_tile - split * params.shared.tiles;
        const PrefixTile tile =
            find_prefix_tile(params.shared, params.batch, number, sequences_of_prefix_tile(params, Traits::rows()));
        if (tile.begin < 0) return false;
        if (static_cast<int>(threadIdx.x) < Traits::rows())
            context.storage.rows[threadIdx.x] =
                PrefixRow::of(params, tile, static_cast<int>(threadIdx.x), split, classes * kDecodeSlab);
        __syncthreads();
        if (threadIdx.x < 32)
            describe(
                {head, split, classes, index - head_of_all * classes, tile.first, tile.keys, INT32_MAX, 0, 0, INT32_MAX, 0, 0});
        __syncthreads();
        return context.storage.work_tile.tiles > 0;
    }
    // Called by all lanes of a warp.
    __device__ __forceinline__ void describe(PrefixWorkTile work_tile) const {
#pragma unroll 1
        for (int row = static_cast<int>(threadIdx.x); row < Traits::rows(); row += 32) {
            const PrefixRow& own = context.storage.rows[row];
            work_tile.first = min(work_tile.first, own.keys.begin), work_tile.last = max(work_tile.last, own.keys.end);
            if (own.batch < 0) continue;
            work_tile.plain = max(work_tile.plain, own.keys.begin);
            work_tile.plain_end = min(work_tile.plain_end, own.keys.end);
        }
        work_tile.first = __reduce_min_sync(0xffffffffu, work_tile.first);
        work_tile.last = __reduce_max_sync(0xffffffffu, work_tile.last);
        work_tile.plain = __reduce_max_sync(0xffffffffu, work_tile.plain);
        work_tile.plain_end = __reduce_min_sync(0xffffffffu, work_tile.plain_end);
        if (work_tile.first < work_tile.last) {
            const int tile_keys = Traits::kBlockN * work_tile.classes;
            work_tile.begin = work_tile.first / tile_keys * tile_keys;
            work_tile.tiles = (work_tile.last - work_tile.begin + tile_keys - 1) / tile_keys;
        }
        if (threadIdx.x == 0) context.storage.work_tile = work_tile;
    }
};

template <class Kernel>
__global__ void __launch_bounds__(DecodePrefixTraits<Kernel>::kMostThreads, 1)
    decode_prefix_kernel(const __grid_constant__ DecodeParams params, const __grid_constant__ DecodePrefixTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Traits = DecodePrefixTraits<Kernel>;
    const DecodePrefixContext<Traits> context(params, maps, Traits::KTile::align(shared));
    DecodePrefixBlock<Traits>{context}.run();
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

// The resources of a thread block with the most rows.
template <class Kernel>
constexpr KernelResources resources_of_decode_prefix(int, int) {
    using Traits = sm90::DecodePrefixTraits<Kernel>;
    return {Traits::kMostThreads, sm90::DecodePrefixBlock<Traits>::kSharedBytes};
}

// Enqueues the kernel on `stream`. The map of K: page or entry, key head, row, channel. Returns a CUDA error.
template <class Kernel>
int launch_decode_prefix(const DecodePlan& plan, const DecodeParams& params, void* stream) {
    using Traits = sm90::DecodePrefixTraits<Kernel>;
    using T = typename Traits::T;
    const LaunchShape& shape = plan.prefix;
    const CacheParams& cache = params.cache;
    const int64_t rows = cache.table ? static_cast<int64_t>(cache.page_size.divisor) : cache.capacity;
    const auto kernel = sm90::decode_prefix_kernel<Kernel>;
    sm90::DecodePrefixTensorMaps maps{};
    cudaError_t error =
        encode_map<T>(&maps.k, sm90::extent(cache.k, params.head_dim, rows, params.heads_k, cache.pages), Traits::kUnit);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    return launch_dependent(kernel, shape.blocks, shape.threads, shape.shared_bytes, static_cast<cudaStream_t>(stream),
                            plan.dependent_launch, params, maps);
}

}  // namespace libflash::cuda
