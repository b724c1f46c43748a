// The sm_90a backward kernel: its parts and the roles of its warpgroups. A work tile is dK and dV of one key tile of one key
// head, from the query tiles that see it in all query heads that share the key head, or from a range of them. Thread blocks are
// persistent.
#pragma once

#include "cuda/sm90/backward_divided.cuh"
#include "cuda/sm90/backward_dk_dv.cuh"
#include "cuda/sm90/backward_dq.cuh"
#include "cuda/sm90/backward_general.cuh"
#include "cuda/sm90/backward_halves.cuh"
#include "cuda/sm90/backward_producer.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

template <class Traits>
using BackwardPlainConsumerOf =
    std::conditional_t<Traits::kDividesProducts, BackwardDividedConsumer<Traits>,
                       std::conditional_t<(Traits::kHeadDim > 64), BackwardHalvesConsumer<Traits>, BackwardConsumer<Traits>>>;
template <class Traits>
using BackwardConsumerOf = std::conditional_t<Traits::kRareOptions && !Traits::kDividesProducts, BackwardGeneralConsumer<Traits>,
                                              BackwardPlainConsumerOf<Traits>>;

template <class Traits>
struct BackwardKernel {
    static constexpr int kSharedBytes =
        shared_bytes_of_kernel<BackwardSharedStorage<Traits>, BackwardSharedTiles<Traits>, Traits::QTile::kAlignment>();

    BackwardContext<Traits>& context;
    const BackwardProducer<Traits> producer{context};
    const BackwardDqWarpgroup<Traits> dq_warpgroup{context};
    const BackwardConsumerOf<Traits> consumer{context};

    __device__ __forceinline__ void run() const {
        if (threadIdx.x == 0) context.storage.init();
        __syncthreads();
        if (threadIdx.x < 128) {
            decrease_registers<Traits::kProducerRegisters>();
            producer.run();
        } else if (threadIdx.x < 256) {
            decrease_registers<Traits::kDqRegisters>();
            dq_warpgroup.run();
        } else {
            increase_registers<Traits::kConsumerRegisters>();
            consumer.run();
        }
    }
};

}  // namespace libflash::cuda::sm90
