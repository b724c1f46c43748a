// The constants of the sm_90a kernel for keys that sequences share: tiles, warps, and how the shared memory is divided.
#pragma once

#include "cuda/attention/decode_params.h"
#include "cuda/attention/element.cuh"
#include "cuda/config.h"
#include "cuda/sm90/decode_prefix_instance.h"
#include "cuda/tile/swizzled_tile.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel>
struct DecodePrefixTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr int kHeadDim = config.head_dim, kStages = config.stages;
    static constexpr int kMostRows = config.tile_q, kBlockN = config.tile_k;
    static constexpr int kUnit = kDecodeSlab, kUnits = kBlockN / kUnit;  // kUnit: consecutive keys of a class
    static constexpr int kGroupRows = kPrefixGroupRows, kMostGroups = kMostRows / kGroupRows;
    static_assert(kMostRows % kGroupRows == 0 && kBlockN == 64 && config.head_dim_v == kHeadDim);
    static constexpr int kProducerWarps = 4;
    static constexpr int kMostThreads = decode_prefix_threads(kMostRows);
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of 168 on average
    using QTile = SwizzledTile<kGroupRows, kHeadDim>;                        // of a consumer warpgroup
    using KTile = SwizzledTile<kBlockN, kHeadDim>;
    using VTile = KTile;
    static constexpr int kTileBytes = kMostGroups * QTile::kBytes + kStages * (KTile::kBytes + VTile::kBytes);

    // The consumers of a thread block: their threads, warpgroups (which share the keys) and rows. The plan chooses how many.
    __device__ static __forceinline__ int consumers() { return static_cast<int>(blockDim.x) - 128; }
    __device__ static __forceinline__ int rows() { return consumers() / 128 * kGroupRows; }
};

}  // namespace libflash::cuda::sm90
