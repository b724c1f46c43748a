// The constants of the sm_90a decode kernel: tiles, registers per thread, and how the shared memory is divided.
#pragma once

#include "cuda/attention/element.cuh"
#include "cuda/config.h"
#include "cuda/tile/swizzled_tile.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel>
struct DecodeTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr int kHeadDim = config.head_dim, kHeadDimV = config.head_dim_v;
    static constexpr int kBlockM = config.tile_q, kBlockN = config.tile_k;
    static_assert(kBlockM == 64 && kBlockN == 64, "a product of a warpgroup has 64 rows, and P is one chunk of 64 columns");
    static constexpr int kGroups = 2;                  // consumer warpgroups; each has half of the channels of O
    static constexpr int kHalf = kHeadDimV / kGroups;  // channels of O of a warpgroup
    static constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 128;
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    using QTile = SwizzledTile<kBlockM, kHeadDim>;
    using KTile = SwizzledTile<kBlockN, kHeadDim>;  // its first kHeadDimV columns are V
    using PTile = SwizzledTile<kBlockM, kBlockN>;
    static constexpr int kStages = config.stages;
    static_assert(kStages == 2, "each warpgroup has one for the tiles whose scores it computes");

    // A key tile is released in parts, so that the loads of the next tile begin early: the columns of V of each warpgroup in two
    // parts, and the columns that only the scores need.
    static constexpr int kPieces = 2, kPiece = kHalf / kPieces;  // channels of a part
    static constexpr int kChunks = KTile::kChunks, kPartChunks = kPiece / KTile::kChunkCols;
    static constexpr int kValueParts = kGroups * kPieces, kParts = kValueParts + 1;
    static_assert(kPartChunks * KTile::kChunkCols == kPiece && kChunks > kValueParts * kPartChunks);
    static constexpr int kTileBytes = QTile::kBytes + kStages * KTile::kBytes + PTile::kBytes;

    // The n-th chunk of a tile to be loaded and multiplied: first the columns that only the scores need, because they are
    // released first, then the columns of V of the warpgroup that computes the scores, then those of the other warpgroup.
    static constexpr int kGroupChunks = kPieces * kPartChunks, kScoreChunks = kChunks - kGroups * kGroupChunks;
    __device__ static __forceinline__ int chunk_in_order(int n, int group) {
        if (n < kScoreChunks) return kGroups * kGroupChunks + n;
        const int value = n - kScoreChunks;
        return value < kGroupChunks ? group * kGroupChunks + value : (1 - group) * kGroupChunks + value - kGroupChunks;
    }
    // A warpgroup multiplies so many chunks before it awaits P of the previous tile, and the others, which are released last,
    // after it.
    static constexpr int kEarlyChunks = kScoreChunks + kGroupChunks;
    __device__ static __forceinline__ int part_of_chunk(int chunk) { return min(chunk / kPartChunks, kValueParts); }
};

}  // namespace libflash::cuda::sm90
