// The constants of the sm_90a backward_tangent kernels for more than 128 channels. Names as in backward_tangent_traits.cuh. The
// accumulator of 64 rows takes half of a warpgroup's registers, so each gradient has its own kernel.
#pragma once

#include "cuda/sm90/backward_tangent_traits.cuh"

namespace libflash::cuda::sm90 {

enum class TangentGradient { tdq, tdk, tdv };

template <class Kernel, TangentGradient kGradient, bool kMovingDout>
struct BackwardTangentWideTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr bool kWide = true, kKeys = kGradient != TangentGradient::tdq;
    // Whether dP and tdP are needed: tdv needs only P and tP.
    static constexpr bool kDifferences = kGradient != TangentGradient::tdv;
    // With dP and tdP, shared memory has room for 64 rows: both warpgroups have these rows, each computes every second tile of
    // columns, and their sums are added at the end. Otherwise each warpgroup has its own rows and computes all tiles.
    static constexpr bool kSharedRows = kDifferences;
    static constexpr int kHeadDim = config.head_dim, kBlockN = config.tile_k;
    static_assert(kUnitRows % kBlockN == 0, "statistics of a tile are in one unit");
    static constexpr int kGroupRows = 64, kGroups = kSharedRows ? 1 : 2;  // groups of rows
    static constexpr int kBlockM = kGroups * kGroupRows;
    static_assert(config.tile_q == kGroupRows, "the schedules are made for tiles of so many rows");
    static constexpr int kConsumerWarps = 8, kColumnWarps = kSharedRows ? 4 : 8;  // kColumnWarps read a tile of columns
    static constexpr int kThreads = 384, kProducerRegisters = 24, kConsumerRegisters = 240;

    static constexpr bool kMovingRows = kDifferences && (kKeys || kMovingDout), kMovingCols = !kKeys || kMovingDout;
    using RowTile = SwizzledTile<kGroupRows, kHeadDim>;
    using ColTile = SwizzledTile<2 * kBlockN, kHeadDim>;
    using SecondColTile = SwizzledTile<(kMovingCols ? 2 : 1) * kBlockN, kHeadDim>;
    static constexpr int kRowTiles = kDifferences ? (kMovingRows ? 4 : 3) : 2;
    static constexpr int kRowOperands = 0;

    static constexpr int kMaxSharedBytes = 227 * 1024, kStorageBytes = 1536;
    static constexpr int kRowBytes = kRowTiles * kGroups * RowTile::kBytes;
    static constexpr int kStatisticsBytes = kKeys ? kBlockN * static_cast<int>(sizeof(TangentStatistics)) : 0;
    static constexpr int kStageBytes = ColTile::kBytes + SecondColTile::kBytes, kStages = 2;
    static_assert(config.stages == kStages, "one for each of two warpgroups");
    // With a tangent of dout there is memory for only one tile of the second tensor. It still has barriers for two stages,
    // because a warpgroup that visits every second tile must wait for every phase of a barrier.
    static constexpr int kSecondStages = kMovingDout ? 1 : kStages;
    static constexpr int kTileBytes =
        kRowBytes + kStages * (ColTile::kBytes + kStatisticsBytes) + kSecondStages * SecondColTile::kBytes;
    static_assert(kTileBytes + kStorageBytes <= kMaxSharedBytes, "a thread block has no more");
};

}  // namespace libflash::cuda::sm90
