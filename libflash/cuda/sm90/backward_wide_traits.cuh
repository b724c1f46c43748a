// The constants of the sm_90a backward kernels for wide heads (backward_wide.cuh): tiles, registers per thread, and how the
// shared memory is divided.
#pragma once

#include "cuda/attention/element.cuh"
#include "cuda/attention/gradient_sums.cuh"
#include "cuda/config.h"
#include "cuda/tile/swizzled_tile.cuh"

namespace libflash::cuda::sm90 {

enum class WideGradient { dv, dk, dq };

// The rows of a thread block are keys, for dq queries. The columns are the other side; the thread block visits their tiles.
//
//   dv    S = K Q'                dv += P dO
//   dk    S = K Q'    dP = V dO'  dk += dS Q
//   dq    S = Q K'    dP = dO V'  dq += dS K
//
// The added tensor is the tensor of the columns that is multiplied by the weights; the streamed tensor is the other one.
template <class Kernel, WideGradient kOutput>
struct BackwardWideTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr WideGradient kGradient = kOutput;
    static constexpr bool kKeys = kOutput != WideGradient::dq;         // the rows are keys, and the scores transposed
    static constexpr bool kDifferences = kOutput != WideGradient::dv;  // the weights are dS, not P
    static constexpr int kHeadDim = config.head_dim, kBlockM = config.tile_q, kBlockN = config.tile_k;
    static_assert(kBlockM == 64 && kBlockN == 64,
                  "a product of a warpgroup has 64 rows, and weights are one chunk of 64 columns");
    static_assert(config.head_dim_v == kHeadDim && config.stages == 1, "one kind of tile, one stage of the added tensor");
    static constexpr int kGroups = 2;                 // consumer warpgroups; each has half of the channels of the sums
    static constexpr int kHalf = kHeadDim / kGroups;  // channels of a warpgroup
    static constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 128;
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    using Tile = SwizzledTile<64, kHeadDim>;
    using WeightTile = SwizzledTile<64, 64>;

    // The added tensor is loaded in chunks of 64 channels and released in pieces, two for each warpgroup.
    static constexpr int kChunks = Tile::kChunks;
    static constexpr int kPieces = 2, kPiece = kHalf / kPieces, kPieceChunks = kPiece / Tile::kChunkCols;
    static constexpr int kPieceBytes = kPieceChunks * Tile::kChunkBytes, kAllPieces = kGroups * kPieces;
    static_assert(kPieceChunks * Tile::kChunkCols == kPiece);
    // The chunks of the streamed tensor are a pipeline. Differences need shared memory for a second tensor of the rows.
    static constexpr int kRowTensors = kDifferences ? 2 : 1, kStreamStages = kDifferences ? 3 : kChunks;
    // dv: while a warpgroup writes the weights of a tile, it may still read the weights of the previous tile, and the other
    // warpgroup those of the tile before. dk and dq: a warp overwrites the 16 rows of weights of the previous tile, which its own
    // products have read by then. This relies on the tensor cores: a warp's products read only the warp's rows of the weights.
    static constexpr int kWeightBuffers = kDifferences ? 1 : 3;
    static constexpr int kTileBytes =
        (kRowTensors + 1) * Tile::kBytes + kStreamStages * Tile::kChunkBytes + kWeightBuffers * WeightTile::kBytes;

    // The partial sums of a thread, if a key tile has several launches.
    using Parts = GradientSums<kConsumers, kHalf / 8>;
};

}  // namespace libflash::cuda::sm90
