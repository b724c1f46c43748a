// The shared memory of the sm_90a forward_tangent kernel for more than 128 channels: first the tiles, then barriers and what the
// warps tell each other.
#pragma once

#include "cuda/sm90/forward_tangent_tensor_maps.cuh"
#include "cuda/sm90/forward_tangent_wide_traits.cuh"
#include "cuda/sm90/forward_tangent_work_tile.cuh"
#include "cuda/sm90/kernel_context.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

// Shared addresses of the tiles.
template <class Traits>
struct ForwardTangentWideTiles {
    static constexpr int kBytes = Traits::kTileBytes;
    static constexpr int kTangents = Traits::UnitTile::kBytes;  // from K or V of a unit to its tangents
    uint32_t q_smem;

    __device__ __forceinline__ explicit ForwardTangentWideTiles(const char* memory) : q_smem(shared_address(memory)) {}
    // Q of a warpgroup, and tQ after it.
    __device__ __forceinline__ uint32_t q(int group) const { return q_smem + group * 2 * Traits::QTile::kBytes; }
    __device__ __forceinline__ uint32_t unit(int stage) const { return q_smem + Traits::kQBytes + stage * Traits::kUnitBytes; }
};

template <class Traits>
struct ForwardTangentWideStorage {
    using WorkTile = ForwardTangentWorkTile<Traits>;
    // The producer writes work tile n when both warpgroups have released Q of n - 2, so when none reads n - 3 any more.
    static constexpr int kSlots = 3;

    PipelineBarriers<Traits::kUnits> units;
    PipelineBarriers<1> q[Traits::kGroups];
    WorkTile work_tiles[kSlots];

    // One thread calls it before the warps take their roles.
    __device__ __forceinline__ void init() {
        units.init(Traits::kConsumerWarps * kArrivalsOfWarp);
        for (PipelineBarriers<1>& of_group : q) of_group.init(Traits::kGroupWarps * kArrivalsOfWarp);
        fence_barrier_init();
    }
    __device__ static __forceinline__ int next_slot(int slot) { return slot + 1 == kSlots ? 0 : slot + 1; }
};

// What all parts of the kernel work with.
template <class Traits>
using ForwardTangentWideContext = KernelContext<ForwardTangentParams, ForwardTangentTensorMaps, ForwardTangentWideStorage<Traits>,
                                                ForwardTangentWideTiles<Traits>>;

// Units of K and tK in a tile: those with channels of the call; the kernel may have more.
template <class Traits>
__device__ __forceinline__ int key_units(const ForwardTangentParams& params) {
    constexpr int kCols = Traits::UnitTile::kChunkCols;
    return (params.head_dim + kCols - 1) / kCols;
}

}  // namespace libflash::cuda::sm90
