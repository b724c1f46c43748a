// The constants of the sm_90a backward kernel: tiles, pipeline stages, registers per thread.
#pragma once

#include "cuda/attention/dq_accumulator.cuh"
#include "cuda/attention/element.cuh"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/config.h"
#include "cuda/sm90/backward_instance.h"
#include "cuda/tile/swizzled_tile.cuh"

namespace libflash::cuda::sm90 {

// kInOrder: additions to the dQ accumulator in a fixed order (backward_fixed_order.cuh).
template <class Kernel, BackwardInstance kInstance = BackwardInstance::plain, bool kInOrder = false>
struct BackwardTraits {
    static constexpr KernelConfig config = Kernel::config;
    static constexpr bool kFixedOrder = kInOrder;
    using T = ElementOf<config.dtype>;
    static constexpr bool kRagged = kInstance != BackwardInstance::plain;  // only the device knows the lengths
    // In a fixed order a work tile visits the query tiles upwards or downwards, each in all heads that share the keys. Where only
    // the device knows the lengths, it visits one head after another upwards: there are not enough registers.
    static constexpr bool kTilesInOrder = kFixedOrder && !kRagged;
    static constexpr bool kRareOptions = kInstance == BackwardInstance::general, kBlockMask = knows_block_mask(kInstance),
                          kSplits = has_splits(kInstance);
    static constexpr int kHeadDim = config.head_dim, kBlockM = config.tile_q, kBlockN = config.tile_k;
    // General instance: queries of a tile that are processed at once, so many that the registers suffice.
    static constexpr int kChunk = kHeadDim <= 64 ? 64 : 32;
    static constexpr int kStages = config.stages, kScoreStages = 2;  // of Q, dO and softmax statistics; of dS
    // Stages of K and V. With two, K and V of the next work tile are loaded before the gradients of the current one are written.
    static constexpr int kKeyStages = kHeadDim <= 64 ? 2 : 1;
    // Two consumer warpgroups. With a tile of 128 keys, each has 64 keys and all their products. With a tile of 64 keys, both
    // have all keys and divide the products (backward_divided.cuh).
    static constexpr int kGroupKeys = 64, kConsumerWarps = 8;
    static constexpr bool kDividesProducts = kBlockN == kGroupKeys;
    // Where the products are divided, dS is computed from rounded P. With fp16, P is then multiplied by 2^kProbabilityShift, so
    // that small probabilities are rounded as precisely as large ones. dS is not multiplied, because its range is larger than
    // that of P.
    static constexpr int kProbabilityShift = kDividesProducts && config.dtype == KernelType::f16_ ? 12 : 0;
    static constexpr float kUndoProbabilityShift = 1.0f / (1 << kProbabilityShift);
    // Warps of the consumers and the dQ warpgroup that read K and V.
    static constexpr int kWarpsThatReadK = kDividesProducts ? 8 : 12, kWarpsThatReadV = kDividesProducts ? 4 : 8;
    static_assert(kDividesProducts || kBlockN == 2 * kGroupKeys, "the registers are for two consumer warpgroups");
    // The producer warpgroup, the dQ warpgroup and two consumer warpgroups.
    static constexpr int kThreads = 4 * 128;
    static constexpr int kProducerRegisters = 32, kDqRegisters = kHeadDim % 64 == 0 ? 64 : 80,
                         kConsumerRegisters = (512 - kProducerRegisters - kDqRegisters) / 2;

    using KvTile = SwizzledTile<kBlockN, kHeadDim>;
    using QTile = SwizzledTile<kBlockM, kHeadDim>;
    using ScoreTile = SwizzledTile<kBlockN, kBlockM>;  // dS^T: one row per key

    // Four warps compute dS K in pieces of 64 queries and kPieceCols channels, one after another. The layout of the accumulator
    // treats each piece as if it had four warps of its own.
    static constexpr int kPieceCols = kHeadDim % 64 == 0 ? 64 : kHeadDim;
    static constexpr int kPieces = kBlockM / 64 * (kHeadDim / kPieceCols);
    using Accumulator = DqAccumulator<T, kHeadDim, kBlockM, kPieces * 4, kBlockM / 16>;
    // A warp adds a piece to the accumulator in kPieceParts parts. Each warp has kSumBuffers buffers in shared memory for them.
    static constexpr int kPieceParts = kDividesProducts ? 2 : 1, kSumBuffers = kDividesProducts ? 2 : kPieces;
    static constexpr int kSumBytes = Accumulator::kWarpFloats / kPieceParts * static_cast<int>(sizeof(float));
};

}  // namespace libflash::cuda::sm90
