// The constants of the sm_90a forward_tangent kernel for more than 128 channels (forward_tangent_wide_consumer.cuh): tiles,
// registers per thread, and how the shared memory is divided.
#pragma once

#include "cuda/attention/element.cuh"
#include "cuda/config.h"
#include "cuda/tile/swizzled_tile.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

template <class Kernel>
struct ForwardTangentWideTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr bool kWide = true;
    static constexpr bool kFused = false, kHalf = std::is_same<T, __half>::value;
    static constexpr int kHeadDim = config.head_dim, kHeadDimV = config.head_dim_v;
    static constexpr int kBlockM = config.tile_q, kBlockN = config.tile_k;
    static_assert(kBlockN == 64, "shared memory feeds products of rows in shared memory at full rate from 64 keys on");
    static constexpr int kGroupRows = 64, kGroups = kBlockM / kGroupRows;  // consumer warpgroups
    static_assert(kGroups == 2, "they take turns");
    static constexpr int kGroupWarps = 4, kConsumerWarps = kGroups * kGroupWarps, kThreads = (kGroups + 1) * 128;
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

    using QTile = SwizzledTile<kGroupRows, kHeadDim>;  // of Q or tQ, one for each warpgroup
    // Beside Q and tQ there is no room for a tile of K, tK, V and tV. A unit has 64 channels of K and tK, or of V and tV.
    using UnitTile = SwizzledTile<kBlockN, 64>;
    static constexpr int kUnitBytes = 2 * UnitTile::kBytes;
    static constexpr int kValueUnits = kHeadDimV / UnitTile::kChunkCols;  // of a tile
    static_assert(kValueUnits * UnitTile::kChunkCols == kHeadDimV);
    static_assert(config.stages == 1, "the units that fit into shared memory do not follow from the table");

    static constexpr int kMaxSharedBytes = 227 * 1024;  // of a thread block
    static constexpr int kStorageBytes = 3 * 1024;      // of these for ForwardTangentWideStorage and alignment
    static constexpr int kQBytes = 2 * kGroups * QTile::kBytes;
    static constexpr int kUnits = (kMaxSharedBytes - kStorageBytes - kQBytes) / kUnitBytes;
    static_assert(kUnits >= kValueUnits, "all values of a tile are zeroed at once");
    static constexpr int kTileBytes = kQBytes + kUnits * kUnitBytes;
};

}  // namespace libflash::cuda::sm90
