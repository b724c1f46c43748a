// The constants of the two sm_90a backward_tangent kernels: tiles, pipeline stages, registers per thread, and what the shared
// memory holds. The rows of the kernel of keys, which computes tdk and tdv, are keys; those of the kernel of queries, which
// computes tdq, are queries. Columns are rows of the other side. Tensors of each side:
//
//   first, tfirst, second, tsecond    for queries Q, tQ, dO, tdO    for keys K, tK, V, tV
#pragma once

#include "cuda/attention/element.cuh"
#include "cuda/attention/tangent_params.h"
#include "cuda/config.h"
#include "cuda/tile/swizzled_tile.cuh"

#include <algorithm>
#include <type_traits>

namespace libflash::cuda::sm90 {

// kMovingDout: dout has a tangent.
template <class Kernel, bool kOfKeys, bool kMovingDout>
struct BackwardTangentTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr bool kWide = false, kKeys = kOfKeys;
    static constexpr int kHeadDim = config.head_dim, kBlockM = config.tile_q;
    // The kernel of queries has registers for more columns. A unit of query rows in the workspace consists of whole tiles.
    static constexpr int kBlockN = kOfKeys || kHeadDim <= 64 ? config.tile_k : (kMovingDout ? 48 : 64);
    static_assert(!kOfKeys || kUnitRows % kBlockN == 0, "statistics of a tile are in one unit");
    static constexpr int kGroupRows = 64, kGroups = kBlockM / kGroupRows;  // consumer warpgroups
    static constexpr int kConsumerWarps = kGroups * 4, kThreads = (kGroups + 1) * 128;
    static constexpr int kColumnWarps = kConsumerWarps;  // that read a tile of columns
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static_assert(kGroups == 2, "the registers are for two consumer warpgroups");

    // Whether the rows, and whether the columns, have tsecond.
    static constexpr bool kMovingRows = kOfKeys || kMovingDout, kMovingCols = !kOfKeys || kMovingDout;
    using RowTile = SwizzledTile<kGroupRows, kHeadDim>;  // of each tensor, one for each warpgroup
    // Rows of a tensor, then the same rows of its tangent, in each chunk of columns.
    using ColTile = SwizzledTile<2 * kBlockN, kHeadDim>;
    using SecondColTile = SwizzledTile<(kMovingCols ? 2 : 1) * kBlockN, kHeadDim>;
    static constexpr int kRowTiles = kMovingRows ? 4 : 3;
    // How many tensors of the rows a consumer holds in registers, as operands: reading them from shared memory in each product
    // would take as long as the product. There are no registers for the other tensors.
    static constexpr int kRowOperands = kHeadDim > 64 ? 0 : (kOfKeys ? 1 : 3);
    // Whether one product multiplies rows by columns and by their tangents, so that it reads the rows only once.
    // The other part of tS then needs separate registers until both parts are added. The same holds for tdP with kMovingRows.
    static constexpr bool kJoinedScores = kHeadDim > 64 && kBlockN < 64, kJoinedDifferences = kHeadDim > 64 && !kMovingRows;

    static constexpr int kMaxSharedBytes = 227 * 1024;  // of a thread block
    static constexpr int kStorageBytes = 1536;          // of these for BackwardTangentStorage and alignment
    static constexpr int kRowBytes = kRowTiles * kGroups * RowTile::kBytes;
    static constexpr int kStatisticsBytes = kOfKeys ? kBlockN * static_cast<int>(sizeof(TangentStatistics)) : 0;  // of queries
    static constexpr int kStageBytes = ColTile::kBytes + SecondColTile::kBytes;
    static constexpr int kStages =
        std::min(config.stages, (kMaxSharedBytes - kStorageBytes - kRowBytes) / (kStageBytes + kStatisticsBytes));
    static constexpr int kSecondStages = kStages;
    static_assert(kStages >= 2, "a tile is loaded while another one is in use");
    static constexpr int kTileBytes = kRowBytes + kStages * (kStageBytes + kStatisticsBytes);
};

}  // namespace libflash::cuda::sm90
