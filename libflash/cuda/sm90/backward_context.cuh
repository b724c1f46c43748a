// What all parts of the sm_90a backward kernel work with.
#pragma once

#include "cuda/sm90/backward_shared_storage.cuh"
#include "cuda/sm90/backward_tensor_maps.cuh"
#include "cuda/sm90/kernel_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
using BackwardContext =
    KernelContext<BackwardParams, BackwardTensorMaps, BackwardSharedStorage<Traits>, BackwardSharedTiles<Traits>>;

}  // namespace libflash::cuda::sm90
