// The constants of the sm_90a decode kernel for many rows of a key head: tiles, warps, and how the shared memory is divided.
#pragma once

#include "cuda/attention/element.cuh"
#include "cuda/sm90/decode_rows_instance.h"
#include "cuda/tile/swizzled_tile.cuh"

namespace libflash::cuda::sm90 {

// kWarpgroups: the number of consumer warpgroups. Each has 64 query rows; they share the keys.
template <class Kernel, int kWarpgroups>
struct DecodeRowsTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr int kHeadDim = config.head_dim, kHeadDimV = config.head_dim_v;
    static constexpr int kGroups = kWarpgroups, kGroupRows = 64;
    static constexpr int kBlockM = kGroups * kGroupRows, kBlockN = config.tile_k;
    static_assert(config.tile_q == kGroupRows && kBlockN == 64, "rows of a product; bits of a tree");
    // The producer warpgroup comes after the consumers. One warp of it loads; all four give up registers.
    static constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 128;
    static constexpr int kStages = decode_rows_stages(config, kGroups), kBlocksAtOnce = decode_rows_blocks_at_once(kGroups);
    static constexpr int kProducerRegisters = kGroups == 1 ? 40 : 24, kConsumerRegisters = kGroups == 1 ? 216 : 240;
    using KTile = SwizzledTile<kBlockN, kHeadDim>;
    using VTile = SwizzledTile<kBlockN, kHeadDimV>;
    static constexpr int kTileBytes = kStages * (KTile::kBytes + VTile::kBytes);
};

}  // namespace libflash::cuda::sm90
