// The context that all parts of the sm_90a backward kernel use: parameters, tensor maps, shared memory and the current work tile.
#pragma once

#include "cuda/sm90/backward_shared_storage.cuh"
#include "cuda/sm90/backward_tensor_maps.cuh"
#include "cuda/sm90/kernel_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardContext
    : KernelContext<BackwardParams, BackwardTensorMaps, BackwardSharedStorage<Traits>, BackwardSharedTiles<Traits>> {
    using Tiles = BackwardSharedTiles<Traits>;
    using KernelContext<BackwardParams, BackwardTensorMaps, BackwardSharedStorage<Traits>, Tiles>::KernelContext;

    int passed = 0;  // how many work tiles this thread has completed

    // Work tiles are a pipeline of two stages; slot() is the stage, phase() the parity of its phase. slot() is also the parity in
    // a pipeline of one stage.
    __device__ __forceinline__ int slot() const { return passed & 1; }
    __device__ __forceinline__ uint32_t phase() const { return static_cast<uint32_t>(passed) >> 1 & 1; }
    __device__ __forceinline__ const BackwardWorkTile<Traits>& tile() const { return this->storage.work_tiles[slot()]; }
    // The stage and the parity for K and V.
    __device__ __forceinline__ int key_stage() const { return Traits::kKeyStages == 2 ? slot() : 0; }
    __device__ __forceinline__ uint32_t key_phase() const {
        return Traits::kKeyStages == 2 ? phase() : static_cast<uint32_t>(slot());
    }
    __device__ __forceinline__ uint32_t k() const { return Tiles::k(this->tiles.address(), key_stage()); }
    __device__ __forceinline__ uint32_t v() const { return Tiles::v_of(k()); }
};

}  // namespace libflash::cuda::sm90
