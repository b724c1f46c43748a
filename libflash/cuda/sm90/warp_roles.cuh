// The roles of the warps of a thread block: the first warpgroup is the producer, the other warpgroups are consumers. (The forward
// kernel may have one more: forward_copy_warpgroup.cuh, forward_code_converter.cuh. The backward kernel has a dQ warpgroup as the
// second one. In decode_rows.cuh the producer is the last one.)
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/uniform.cuh"

namespace libflash::cuda::sm90 {

// The number of the warp. The shuffle tells the compiler that it is the same in all lanes.
__device__ __forceinline__ int uniform_warp() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0); }

// Runs the roles. The producer needs few registers, so it leaves the rest to the consumers.
template <class Traits, class ProducerWarpgroup, class Consumer>
__device__ __forceinline__ void run_roles(const ProducerWarpgroup& producer, const Consumer& consumer) {
    if (threadIdx.x < 128) {
        decrease_registers<Traits::kProducerRegisters>();
        producer.run();
    } else {
        increase_registers<Traits::kConsumerRegisters>();
        consumer.run();
    }
}

}  // namespace libflash::cuda::sm90
