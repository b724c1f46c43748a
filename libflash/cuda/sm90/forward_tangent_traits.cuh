// The constants of a template instance of the sm_90a forward_tangent kernel: tiles, pipeline stages, registers per thread, and
// what the shared memory holds.
#pragma once

#include "cuda/attention/element.cuh"
#include "cuda/config.h"
#include "cuda/sm90/forward_tangent_instance.h"
#include "cuda/tile/swizzled_tile.cuh"

#include <algorithm>
#include <type_traits>

namespace libflash::cuda::sm90 {

template <class Kernel, TangentInstance kInstance>
struct ForwardTangentTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr bool kWide = false;
    static constexpr bool kFused = kInstance == TangentInstance::fused, kHalf = std::is_same<T, __half>::value;
    static constexpr int kHeadDim = config.head_dim, kHeadDimV = config.head_dim_v;
    static constexpr int kBlockM = config.tile_q, kBlockN = config.tile_k;
    static constexpr int kGroupRows = 64, kGroups = kBlockM / kGroupRows;  // consumer warpgroups
    static constexpr int kConsumerWarps = kGroups * 4, kThreads = (kGroups + 1) * 128;
    // Whether ts is computed after the products with V of the previous tile, not before. Then it takes the registers of P and
    // P (ts - pivot) of that tile, so that tiles may be larger; half of the softmax overlaps only products of the other
    // warpgroups.
    static constexpr bool kLateTangents = kFused;
    using QTile = SwizzledTile<kGroupRows, kHeadDim>;  // of Q or tQ, one for each warpgroup
    // Rows of K, then the same rows of tK, in each chunk of columns: one product multiplies Q with both.
    using KeysTile = SwizzledTile<2 * kBlockN, kHeadDim>;
    using VTile = SwizzledTile<kBlockN, kHeadDimV>;  // of V or tV

    static constexpr int kProducerRegisters = kGroups == 3 ? 32 : 40;
    static constexpr int kConsumerRegisters = kGroups == 3 ? 160 : 232;

    static constexpr int kMaxSharedBytes = 227 * 1024;  // of a thread block
    static constexpr int kStorageBytes = 3 * 1024;      // of these for ForwardTangentStorage and alignment
    static constexpr int kQBytes = 2 * kGroups * QTile::kBytes;
    static constexpr int kStageBytes = KeysTile::kBytes + 2 * VTile::kBytes;
    static constexpr int kStages = std::min(config.stages, (kMaxSharedBytes - kStorageBytes - kQBytes) / kStageBytes);
    static_assert(kStages >= 1, "keys and values have stages of their own: K of a tile is in use together with V of another one");
    static constexpr int kTileBytes = kQBytes + kStages * kStageBytes;
};

}  // namespace libflash::cuda::sm90
