// The shared memory of the sm_90a forward_tangent kernel: first the tiles, then barriers and what the warps tell each other.
#pragma once

#include "cuda/sm90/forward_tangent_tensor_maps.cuh"
#include "cuda/sm90/forward_tangent_traits.cuh"
#include "cuda/sm90/forward_tangent_work_tile.cuh"
#include "cuda/sm90/kernel_context.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

// Shared addresses of the tiles.
template <class Traits>
struct ForwardTangentSharedTiles {
    static constexpr int kBytes = Traits::kTileBytes;
    uint32_t q_smem, keys_smem, v_smem;

    __device__ __forceinline__ explicit ForwardTangentSharedTiles(const char* memory) {
        q_smem = shared_address(memory);
        keys_smem = q_smem + Traits::kQBytes;
        v_smem = keys_smem + Traits::kStages * Traits::KeysTile::kBytes;
    }
    __device__ __forceinline__ uint32_t q(int group) const { return q_smem + group * Traits::QTile::kBytes; }
    __device__ __forceinline__ uint32_t tq(int group) const { return q(Traits::kGroups + group); }
    __device__ __forceinline__ uint32_t keys(int stage) const { return keys_smem + stage * Traits::KeysTile::kBytes; }
    __device__ __forceinline__ uint32_t v(int stage) const { return v_smem + 2 * stage * Traits::VTile::kBytes; }
    __device__ __forceinline__ uint32_t tv(int stage) const { return v(stage) + Traits::VTile::kBytes; }
};

template <class Traits>
struct ForwardTangentStorage {
    using WorkTile = ForwardTangentWorkTile<Traits>;
    // The producer writes work tile n when all consumers have released Q of n - 2, so when none reads n - 3 any more.
    static constexpr int kSlots = 3;

    PipelineBarriers<Traits::kStages> keys, v;
    PipelineBarriers<1> q;
    WorkTile work_tiles[kSlots];

    // One thread calls it before the warps take their roles.
    __device__ __forceinline__ void init() {
        keys.init(Traits::kConsumerWarps);
        v.init(Traits::kConsumerWarps);
        q.init(Traits::kConsumerWarps);
        fence_barrier_init();
    }
    __device__ static __forceinline__ int next_slot(int slot) { return slot + 1 == kSlots ? 0 : slot + 1; }
};

// What all parts of the kernel work with.
template <class Traits>
using ForwardTangentContext = KernelContext<ForwardTangentParams, ForwardTangentTensorMaps, ForwardTangentStorage<Traits>,
                                            ForwardTangentSharedTiles<Traits>>;

}  // namespace libflash::cuda::sm90
