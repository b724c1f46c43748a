// Decode for sm_90a where many query rows share a key head, up to 128 channels: nodes of trees, several new rows, large groups of
// heads. Other kernels append rows and combine splits (attention/).
//
// A thread block has 64 or 128 rows of one sequence, packed from query rows and the heads that share a key head, and one range of
// keys: a consumer warpgroup for each 64 rows (decode_rows_consumer.cuh) and a producer warp (decode_rows_producer.cuh).
#pragma once

#include "cuda/attention/beside_prefill.cuh"
#include "cuda/attention/launch_dependent.cuh"
#include "cuda/params.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/prefetch.cuh"
#include "cuda/sm90/decode_rows_consumer.cuh"
#include "cuda/sm90/decode_rows_producer.cuh"
#include "cuda/sm90/forward_tensor_maps.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodeRowsBlock {
    static constexpr int kSharedBytes =
        shared_bytes_of_kernel<DecodeRowsStorage<Traits>, DecodeRowsTiles<Traits>, Traits::KTile::kAlignment>();
    static_assert(Traits::kBlocksAtOnce * (kSharedBytes + 1024) <= 228 * 1024, "CUDA reserves 1 KB for each");

    const DecodeRowsContext<Traits>& context;
    const DecodeRowsProducer<Traits> producer{context};
    const DecodeRowsConsumer<Traits> consumer{context};

    __device__ __forceinline__ void run() const {
        if (threadIdx.x == 0) {
            tma_prefetch_map(context.maps.k);
            tma_prefetch_map(context.maps.v);
            context.storage.init();
        }
        fetch_lengths();
        const bool has_rows = wait_unless_beside_prefill(context.params);
        allow_next_kernel();
        if (!has_rows || !find_work_tile()) return;
        const DecodeWorkTile& work_tile = context.storage.work_tile;
        if (work_tile.tiles == 0) return store_without_keys<Traits>(context.params, work_tile.rows);
        const int warp = uniform_warp();
        if (warp >= Traits::kConsumers / 32) {
            decrease_registers<Traits::kProducerRegisters>();
            if (warp == Traits::kConsumers / 32) producer.run();
        } else {
            increase_registers<Traits::kConsumerRegisters>();
            consumer.run(warp);
        }
    }

private:
    // Prefetches lengths and block table into L2 at once: the thread block reads them one after the other.
    __device__ __forceinline__ void fetch_lengths() const {
        constexpr int kLine = 32;  // int32 in 128 bytes
        const DecodeParams& params = context.params;
        const CacheParams& cache = params.cache;
        const int at = kLine * static_cast<int>(threadIdx.x);
        if (params.ragged.queries.cu && at <= params.batch) prefetch_to_l2(params.ragged.queries.cu + at);
        if (cache.seqlens && at < params.batch) prefetch_to_l2(cache.seqlens + at);
        // The sequence, if each has one tile.
        const int batch = divide(divide(static_cast<int>(blockIdx.x), params.by_heads), params.by_splits);
        if (!cache.table || cache.table_column != 1 || batch >= params.batch) return;
        const int page = static_cast<int>(cache.page_size.divisor), columns = divide(cache.capacity + page - 1, cache.page_size);
        if (at < columns) prefetch_to_l2(cache.table + batch * cache.table_batch + at);
    }
    // Heads vary fastest, then splits, then tiles: thread blocks without a tile, of which there may be many, come last. Thread
    // blocks of one sequence and head still run at about the same time, and find the keys in the L2 cache. Returns false if there
    // is no such tile.
    __device__ __forceinline__ bool find_work_tile() const {
        const DecodeParams& params = context.params;
        const int index = static_cast<int>(blockIdx.x), range = divide(index, params.by_heads),
                  head = index - range * params.heads_k, tile_of_all = divide(range, params.by_splits),
                  split = range - tile_of_all * params.splits;
        const RaggedTile tile = params.ragged.most_rows > 0 ? find_short_tile<Traits::kBlockM>(params, tile_of_all)
                                                            : find_ragged_tile(params, tile_of_all, Traits::kBlockM);
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
        const int first_row = divide(first, params.by_group), last_row = divide(first + rows - 1, params.by_group);
        const int own = min(first + static_cast<int>(threadIdx.x), first + rows - 1), query = divide(own, params.by_group);
        const RaggedKeys keys(params, sequence, first_row, last_row, split, Traits::kBlockN);
        const VisibleRange seen = keys.range(keys.tree_bits(), query);
        context.storage.seen[threadIdx.x] = make_int2(max(seen.begin, keys.first), min(seen.end, keys.last));
        if (params.alibi_slopes.data) {
            const int of_all = head * params.group_size + own - query * params.group_size;
            context.storage.slope[threadIdx.x] =
                head_number<typename Traits::T>(params.alibi_slopes, tile.batch, of_all) * kLog2e;
        }
        if (threadIdx.x > 0) return;
        context.storage.shift = keys.shift;
        context.storage.work_tile =
            make_decode_work_tile({tile.batch, head, split, first, rows, sequence}, keys, Traits::kBlockN);
    }
};

template <class Kernel, int kWarpgroups>
__global__ void __launch_bounds__(DecodeRowsTraits<Kernel, kWarpgroups>::kThreads,
                                  DecodeRowsTraits<Kernel, kWarpgroups>::kBlocksAtOnce)
    decode_rows_kernel(const __grid_constant__ DecodeParams params, const __grid_constant__ DecodeRowsTensorMaps maps) {
    extern __shared__ __align__(1024) char shared[];
    using Traits = DecodeRowsTraits<Kernel, kWarpgroups>;
    const DecodeRowsContext<Traits> context(params, maps, Traits::KTile::align(shared));
    DecodeRowsBlock<Traits>{context}.run();
}

// The maps of the caches: page or entry, key head, row, channel.
template <class Traits>
cudaError_t encode_caches(DecodeRowsTensorMaps* maps, const DecodeParams& params) {
    using T = typename Traits::T;
    const CacheParams& cache = params.cache;
    const int64_t rows = cache.table ? static_cast<int64_t>(cache.page_size.divisor) : cache.capacity;
    maps->box_rows = box_rows(cache, Traits::kBlockN);
    const cudaError_t error =
        encode_map<T>(&maps->k, extent(cache.k, params.head_dim, rows, params.heads_k, cache.pages), maps->box_rows);
    if (error != cudaSuccess) return error;
    return encode_map<T>(&maps->v, extent(cache.v, params.head_dim_v, rows, params.heads_k, cache.pages), maps->box_rows);
}

template <class Kernel, int kWarpgroups>
int launch_decode_rows(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    const LaunchShape& shape = plan.attention;
    const auto kernel = decode_rows_kernel<Kernel, kWarpgroups>;
    DecodeRowsTensorMaps maps{};
    cudaError_t error = encode_caches<DecodeRowsTraits<Kernel, kWarpgroups>>(&maps, params);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    return launch_dependent(kernel, shape.blocks + waiting_blocks(params), shape.threads, shape.shared_bytes, stream,
                            plan.dependent_launch, params, maps);
}

// Launches the instance of the plan.
template <class Kernel>
int launch_decode_rows(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    if (plan.attention.blocks == 0) return cudaSuccess;
    return plan.instance.number == kDecodeOf128Rows.number ? launch_decode_rows<Kernel, 2>(plan, params, stream)
                                                           : launch_decode_rows<Kernel, 1>(plan, params, stream);
}

// The resources of each instance.
template <class Kernel>
constexpr KernelResources resources_of_decode_rows(int instance) {
    using One = DecodeRowsTraits<Kernel, 1>;
    using Two = DecodeRowsTraits<Kernel, 2>;
    return instance == kDecodeOf128Rows.number ? KernelResources{Two::kThreads, DecodeRowsBlock<Two>::kSharedBytes}
                                               : KernelResources{One::kThreads, DecodeRowsBlock<One>::kSharedBytes};
}

}  // namespace libflash::cuda::sm90
