// Decode for sm_90a: the kernel for values that are the first channels of the keys (MLA), and the launches of this kernel and of
// the kernel for many rows (decode_rows.cuh). Other kernels append rows and combine splits (attention/).
//
// MLA: a few query rows of each sequence, of all query heads that share a key head, against its KV cache. A key tile is loaded
// once, by TMA, and serves as K and as V.
//
// A thread block has 64 rows of one sequence and one range of keys: two consumer warpgroups (decode_consumer.cuh) and a producer
// warp (decode_producer.cuh).
#pragma once

#include "cuda/attention/append.cuh"
#include "cuda/attention/combine_few_splits.cuh"
#include "cuda/attention/launch_dependent.cuh"
#include "cuda/params.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/decode_consumer.cuh"
#include "cuda/sm90/decode_producer.cuh"
#include "cuda/sm90/decode_rows.cuh"
#include "cuda/sm90/extent.cuh"
#include "cuda/sm90/forward_tensor_maps.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodeBlock {
    using Storage = DecodeSharedStorage<Traits>;
    static constexpr int kSharedBytes = shared_bytes_of_kernel<Storage, DecodeSharedTiles<Traits>, Traits::QTile::kAlignment>();

    const DecodeContext<Traits>& context;
    const DecodePair<Traits> pair{context.params};
    const DecodeProducer<Traits> producer{context};
    const DecodeConsumer<Traits> consumer{context};

    __device__ __forceinline__ void run() const {
        if (threadIdx.x == 0) {
            tma_prefetch_map(context.maps.k);
            context.storage.init(pair);
        }
        wait_for_previous_kernel();
        allow_next_kernel();
        if (!find_work_tile()) return;
        const DecodeWorkTile& work_tile = context.storage.work_tile;
        if (work_tile.tiles == 0) return store_without_keys<Traits>(context.params, work_tile.rows);
        if (pair.in_pairs) wait_for_cluster();
        run_roles<Traits>(producer, consumer);
        if (pair.in_pairs) wait_for_cluster();  // until then the other thread block may load into this one
    }

private:
    // Consecutive thread blocks have the tiles of a key head; then follow heads and splits. Returns false if there is no such
    // tile.
    __device__ __forceinline__ bool find_work_tile() const {
        const DecodeParams& params = context.params;
        const int index = static_cast<int>(blockIdx.x), head_of_all = divide(index, params.by_tiles),
                  split = divide(head_of_all, params.by_heads), head = head_of_all - split * params.heads_k;
        const RaggedTile tile =
            find_ragged_tile(params, index - head_of_all * static_cast<int>(params.by_tiles.divisor), Traits::kBlockM);
        if (tile.batch < 0) return false;
        if (threadIdx.x < Traits::kBlockM) describe(tile, head, split);
        __syncthreads();
        return true;
    }
    // Called by one thread for each row.
    __device__ __forceinline__ void describe(const RaggedTile& tile, int head, int split) const {
        const DecodeParams& params = context.params;
        const RaggedSequence sequence = RaggedSequence::of(params.ragged, tile.batch);
        const int first = tile.tile * Traits::kBlockM, rows = min(Traits::kBlockM, sequence.rows * params.group_size - first);
        // The keys are those of all rows of the pair.
        const int tiles = 1 + pair.in_pairs, first_of_pair = (tile.tile & ~pair.in_pairs) * Traits::kBlockM,
                  rows_of_pair = min(tiles * Traits::kBlockM, sequence.rows * params.group_size - first_of_pair);
        const int first_row = divide(first_of_pair, params.by_group),
                  last_row = divide(first_of_pair + rows_of_pair - 1, params.by_group),
                  own = min(first + static_cast<int>(threadIdx.x), first + rows - 1);
        const RaggedKeys keys(params, sequence, first_row, last_row, split, Traits::kBlockN);
        const VisibleRange seen = keys.range(keys.tree_bits(), divide(own, params.by_group));
        context.storage.seen[threadIdx.x] = make_int2(max(seen.begin, keys.first), min(seen.end, keys.last));
        if (threadIdx.x > 0) return;
        context.storage.work_tile =
            make_decode_work_tile({tile.batch, head, split, first, rows, sequence}, keys, Traits::kBlockN);
    }
};

template <class Kernel>
__global__ void __launch_bounds__(DecodeTraits<Kernel>::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams params, const __grid_constant__ DecodeTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Traits = DecodeTraits<Kernel>;
    const DecodeContext<Traits> context(params, maps, Traits::QTile::align(shared));
    DecodeBlock<Traits>{context}.run();
}

// The map of the cache: page or entry, key head, row, channel.
template <class Traits>
cudaError_t encode_keys(DecodeTensorMaps* maps, const DecodeParams& params) {
    const CacheParams& cache = params.cache;
    const int64_t rows = cache.table ? static_cast<int64_t>(cache.page_size.divisor) : cache.capacity;
    maps->box_rows = box_rows(cache, Traits::kBlockN);
    return encode_map<typename Traits::T>(&maps->k, extent(cache.k, Traits::kHeadDim, rows, params.heads_k, cache.pages),
                                          maps->box_rows);
}

template <class Kernel>
int launch_attention(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    const LaunchShape& shape = plan.attention;
    if (shape.blocks == 0) return cudaSuccess;
    const auto kernel = decode_kernel<Kernel>;
    DecodeTensorMaps maps{};
    cudaError_t error = encode_keys<DecodeTraits<Kernel>>(&maps, params);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    return launch_clusters(1 + params.in_pairs, kernel, shape.blocks, shape.threads, shape.shared_bytes, stream,
                           plan.dependent_launch, params, maps);
}

}  // namespace libflash::cuda::sm90

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_decode(int step, [[maybe_unused]] int instance) {
    constexpr KernelConfig config = Kernel::config;
    switch (static_cast<DecodeStep>(step)) {
        case DecodeStep::append: return {append_threads(config.head_dim), 0};
        case DecodeStep::combine: return {CombineSplits<ElementOf<config.dtype>, config.head_dim_v>::kThreads, 0};
        default: break;
    }
    if constexpr (sm90::has_values_in_keys(config)) {
        using Traits = sm90::DecodeTraits<Kernel>;
        return {Traits::kThreads, sm90::DecodeBlock<Traits>::kSharedBytes};
    } else {
        return sm90::resources_of_decode_rows<Kernel>(instance);
    }
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_decode(const DecodePlan& plan, const DecodeParams& params, void* stream) {
    using T = ElementOf<Kernel::config.dtype>;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    int error = launch_append<Kernel, T>(plan, params, cuda_stream);
    if (error != cudaSuccess) return error;
    if constexpr (sm90::has_values_in_keys(Kernel::config)) {
        error = sm90::launch_attention<Kernel>(plan, params, cuda_stream);
        return error != cudaSuccess ? error : launch_combine<Kernel, T>(plan, params, cuda_stream);
    } else {
        error = sm90::launch_decode_rows<Kernel>(plan, params, cuda_stream);
        if (error != cudaSuccess) return error;
        // The results have the type of the queries.
        const bool few_splits = are_few_splits(plan.splits, Kernel::config.head_dim_v);
        return launch_combine_kernel(few_splits ? combine_few_splits_kernel<Kernel, T, T> : combine_kernel<Kernel, T, T>, plan,
                                     params, cuda_stream);
    }
}

}  // namespace libflash::cuda
