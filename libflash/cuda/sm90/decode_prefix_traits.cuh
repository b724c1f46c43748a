// The constants of the sm_90a kernel for keys that sequences share: tiles, warps, and how the shared memory is divided.
#pragma once

#include "cuda/attention/decode_params.h"
#include "cuda/attention/element.cuh"
#include "cuda/config.h"
#include "cuda/tile/swizzled_tile.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel>
struct DecodePrefixTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr int kHeadDim = config.head_dim, kStages = config.stages;
    static constexpr int kBlockM = config.tile_q, kBlockN = config.tile_k;
    static constexpr int kUnit = kDecodeSlab, kUnits = kBlockN / kUnit;  // of keys: those of a class that are consecutive
    static constexpr int kGroups = kBlockM / 64, kGroupRows = 64;        // consumer warpgroups, which share the keys
    static_assert(kBlockM % kGroupRows == 0 && kBlockN == 64 && config.head_dim_v == kHeadDim);
    static constexpr int kConsumers = kGroups * 128, kThreads = 128 + kConsumers;
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of the 168 for each thread
    using QTile = SwizzledTile<kBlockM, kHeadDim>;
    using KTile = SwizzledTile<kBlockN, kHeadDim>;
    using VTile = KTile;
    static constexpr int kTileBytes = QTile::kBytes + kStages * (KTile::kBytes + VTile::kBytes);
};

}  // namespace libflash::cuda::sm90
