// The context that all parts of the sm_90a forward kernel use: parameters, tensor maps and shared memory.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/sm90/forward_shared_storage.cuh"
#include "cuda/sm90/forward_tensor_maps.cuh"
#include "cuda/sm90/kernel_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
using ForwardContext =
    KernelContext<typename Traits::Params, ForwardTensorMaps, ForwardSharedStorage<Traits>, ForwardSharedTiles<Traits>>;

}  // namespace libflash::cuda::sm90
