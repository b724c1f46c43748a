// The sm_90a forward kernel: its parts and the roles of its warps.
#pragma once

#include "cuda/sm90/forward_cached_producer.cuh"
#include "cuda/sm90/forward_code_converter.cuh"
#include "cuda/sm90/forward_code_loader.cuh"
#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/forward_copy_warpgroup.cuh"
#include "cuda/sm90/forward_empty_tiles.cuh"
#include "cuda/sm90/forward_producer.cuh"
#include "cuda/sm90/forward_query_producer.cuh"
#include "cuda/sm90/forward_scheduler_warp.cuh"
#include "cuda/sm90/forward_traits.cuh"
#include "cuda/sm90/forward_zero_fill.cuh"
#include "cuda/sm90/invariant_consumer.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

// These warps wait for the previous kernel: the producer warp; the warp that writes work tiles without keys, which over a cache
// that TMA loads first loads V; with lengths on the device, the scheduler warp; and the warps that copy keys, or load and convert
// codes. The other warps need not wait: before they read or write global memory, they wait on an mbarrier for a load that the
// producer issued after its own wait.
template <class Traits>
struct ForwardProducerWarpgroup {
    const ForwardContext<Traits>& context;
    using OfCache = std::conditional_t<Traits::kCopied, ForwardQueryProducer<Traits>, ForwardCachedProducer<Traits, false>>;
    const std::conditional_t<Traits::kCache, OfCache, ForwardProducer<Traits>> producer{context};
    const ForwardSchedulerWarp<Traits> scheduler_warp{context};
    const ForwardEmptyTilesWarp<Traits> empty_tiles_warp{context};
    const ForwardZeroFillWarp<Traits> zero_fill_warp{context};

    __device__ __forceinline__ void run() const {
        if (threadIdx.x < 32) {
            producer.run();
        } else if (threadIdx.x < 64) {
            scheduler_warp.run();
        } else if (threadIdx.x < 96) {
            if constexpr (Traits::kCodes) {
                ForwardCodeLoader<Traits, true>{context}.run();
            } else if constexpr (Traits::kCache && !Traits::kCopied) {
                ForwardCachedProducer<Traits, true>{context}.run();
            }
            if (!context.maps.all_see_keys) empty_tiles_warp.run();
        } else if constexpr (Traits::kCodes) {
            ForwardCodeLoader<Traits, false>{context}.run();
        } else if constexpr (Traits::kDynamic && !Traits::kCopied) {
            zero_fill_warp.run();
        }
    }
};

// The consumers of the instance with rare options up to 64 channels: their code is separate for calls without bias and mask,
// because a condition that is tested while products run slows such calls.
template <class Traits>
struct ForwardOptionConsumers {
    const ForwardContext<Traits>& context;

    __device__ __forceinline__ void run() const {
        const RareParams& rare = context.params.rare;
        if (rare.bias.data || rare.mask.data) {
            ForwardConsumer<Traits, true>(context).run();
        } else {
            ForwardConsumer<Traits, false>(context).run();
        }
    }
};

template <class Traits>
struct ForwardKernel {
    static constexpr int kSharedBytes =
        shared_bytes_of_kernel<ForwardSharedStorage<Traits>, ForwardSharedTiles<Traits>, Traits::QTile::kAlignment>();
    static_assert(kSharedBytes - Traits::kTileBytes <= Traits::kStorageBytes, "the tiles may have the rest");

    const ForwardContext<Traits>& context;
    const ForwardProducerWarpgroup<Traits> producer_warpgroup{context};
    using Consumer = std::conditional_t<Traits::kRareOptions && Traits::kHeadDim <= 64, ForwardOptionConsumers<Traits>,
                                        ForwardConsumer<Traits>>;
    const std::conditional_t<Traits::kInvariant, InvariantConsumer<Traits>, Consumer> consumer{context};

    __device__ __forceinline__ void run() const {
        if (threadIdx.x == 0) prepare();
        __syncthreads();
        if (works_in_pairs()) wait_for_cluster();
        if (Traits::kCopied && threadIdx.x >= Traits::kThreads - 128) {
            if constexpr (Traits::kCopied) {
                decrease_registers<Traits::kCopyRegisters>();
                std::conditional_t<Traits::kCodes, ForwardCodeConverter<Traits>, ForwardCopyWarpgroup<Traits>>{context}.run();
            }
        } else {
            run_roles<Traits>(producer_warpgroup, consumer);
        }
        if (works_in_pairs()) wait_for_cluster();  // until then the other thread block may arrive at barriers of this one
    }

private:
    __device__ __forceinline__ bool works_in_pairs() const {
        if constexpr (Traits::kPairs) return context.params.in_pairs;
        return false;
    }
    __device__ __forceinline__ void prepare() const {
        tma_prefetch_map(context.maps.q);
        if (!Traits::kCopied || Traits::kCodes) {
            tma_prefetch_map(context.maps.k);
            tma_prefetch_map(context.maps.v);
        }
        if (Traits::kTmaStore) tma_prefetch_map(context.maps.out);
        context.storage.init(works_in_pairs() ? 2 : 1);
    }
};

}  // namespace libflash::cuda::sm90
