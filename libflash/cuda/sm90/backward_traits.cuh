// The constants of the sm_90a backward kernel: tiles, pipeline stages, registers per thread.
#pragma once

#include "cuda/attention/dq_accumulator.cuh"
#include "cuda/attention/element.cuh"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/config.h"
#include "cuda/sm90/backward_instance.h"
#include "cuda/tile/swizzled_tile.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel, BackwardInstance kInstance = BackwardInstance::plain>
struct BackwardTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr bool kRagged = kInstance != BackwardInstance::plain;  // only the device knows the lengths
    static constexpr bool kRareOptions = kInstance == BackwardInstance::general,
                          kBlockMask = kRareOptions || kInstance == BackwardInstance::block_mask;
    static constexpr int kHeadDim = config.head_dim, kBlockM = config.tile_q, kBlockN = config.tile_k;
    static constexpr int kChunk = kHeadDim <= 64 ? 64 : 32;  // general instance: queries of a tile that are processed at once
    static constexpr int kStages = config.stages, kScoreStages = 2;  // of Q, dO and softmax statistics; of dS
    static constexpr int kGroupKeys = 64, kGroups = kBlockN / kGroupKeys;
    static constexpr int kConsumerWarps = kGroups * 4;
    static_assert(kGroups == 2, "the registers are for two consumer warpgroups");
    // The producer warpgroup, the dQ warpgroup, the consumers.
    static constexpr int kThreads = (2 + kGroups) * 128;
    static constexpr int kProducerRegisters = 24, kDqRegisters = kHeadDim % 64 == 0 ? 72 : 88,
                         kConsumerRegisters = (512 - kProducerRegisters - kDqRegisters) / 2;

    using KvTile = SwizzledTile<kBlockN, kHeadDim>;
    using QTile = SwizzledTile<kBlockM, kHeadDim>;
    using ScoreTile = SwizzledTile<kBlockN, kBlockM>;  // dS^T: one row per key

    // Four warps compute dS K in pieces of 64 queries and kPieceCols channels, one after another. The layout of the accumulator
    // treats each piece as if it had four warps of its own.
    static constexpr int kPieceCols = kHeadDim % 64 == 0 ? 64 : kHeadDim;
    static constexpr int kPieces = kBlockM / 64 * (kHeadDim / kPieceCols);
    using Accumulator = DqAccumulator<T, kHeadDim, kBlockM, kPieces * 4, kBlockM / 16>;
};

}  // namespace libflash::cuda::sm90
