// The constants of the sm_90a forward kernel for wide heads (forward_wide.cuh): tiles, registers per thread, and how the shared
// memory is divided.
#pragma once

#include "cuda/attention/element.cuh"
#include "cuda/config.h"
#include "cuda/tile/swizzled_tile.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel>
struct ForwardWideTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr int kHeadDim = config.head_dim, kHeadDimV = config.head_dim_v;
    static constexpr int kBlockM = config.tile_q, kBlockN = config.tile_k, kGroupRows = kBlockM;
    static_assert(kBlockM == 64 && kBlockN == 64, "a product of a warpgroup has 64 rows, and P is one chunk of 64 columns");
    static_assert(config.stages == 1, "shared memory has room for one tile of K and one of V beside Q");
    static constexpr int kGroups = 2;                  // consumer warpgroups; each has half of the channels of O
    static constexpr int kHalf = kHeadDimV / kGroups;  // channels of O of a warpgroup
    static constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 128;
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    static constexpr bool kTmaStore = false;  // for encode()
    using QTile = SwizzledTile<kBlockM, kHeadDim>;
    using KTile = SwizzledTile<kBlockN, kHeadDim>;
    using VTile = SwizzledTile<kBlockN, kHeadDimV>;
    using PTile = SwizzledTile<kBlockM, kBlockN>;

    // Tiles are loaded and released in parts, so that the loads of the next tile begin early: K in chunks of 64 channels, V in
    // pieces, two for each warpgroup.
    static constexpr int kChunks = KTile::kChunks;
    static constexpr int kPieces = 2, kPiece = kHalf / kPieces, kPieceChunks = kPiece / VTile::kChunkCols;
    static constexpr int kPieceBytes = kPieceChunks * VTile::kChunkBytes, kAllPieces = kGroups * kPieces;
    static_assert(kPieceChunks * VTile::kChunkCols == kPiece);
    // While a warpgroup writes P of a tile, it may still read P of the previous tile, and the other warpgroup may still read P of
    // the tile before the previous one.
    static constexpr int kPBuffers = 3;
    static constexpr int kTileBytes = QTile::kBytes + KTile::kBytes + VTile::kBytes + kPBuffers * PTile::kBytes;
};

}  // namespace libflash::cuda::sm90
