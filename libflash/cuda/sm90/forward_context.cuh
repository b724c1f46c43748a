// What all parts of the sm_90a forward kernel work with. Each part holds a reference to it.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/sm90/forward_shared_storage.cuh"
#include "cuda/sm90/forward_tensor_maps.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardContext {
    const ForwardParams& params;
    const ForwardTensorMaps& maps;
    ForwardSharedStorage<Traits>& storage;
    const ForwardSharedTiles<Traits> tiles;

    // `memory`: dynamic shared memory, aligned as tiles are.
    __device__ __forceinline__ ForwardContext(const ForwardParams& p, const ForwardTensorMaps& m, char* memory)
        : params(p), maps(m), storage(*reinterpret_cast<ForwardSharedStorage<Traits>*>(memory + Traits::kTileBytes)),
          tiles(memory) {}
};

}  // namespace libflash::cuda::sm90
