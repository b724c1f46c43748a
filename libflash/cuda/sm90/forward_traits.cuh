// The constants of a template instance of the sm_90a forward kernel: tiles, pipeline stages, registers per thread, and what the
// shared memory holds.
#pragma once

#include "cuda/attention/element.cuh"
#include "cuda/attention/prefill_params.h"
#include "cuda/config.h"
#include "cuda/sm90/forward_bias_tile.cuh"
#include "cuda/sm90/forward_consumer_thread.cuh"
#include "cuda/sm90/forward_instance.h"
#include "cuda/sm90/online_softmax.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/tile/swizzled_tile.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

constexpr RowStatisticsKind row_statistics_kind(ForwardInstance kind) {
    switch (kind) {
        case ForwardInstance::maxima: return RowStatisticsKind::maxima;
        case ForwardInstance::entropy: return RowStatisticsKind::entropy;
        case ForwardInstance::statistics: return RowStatisticsKind::either;
        default: return RowStatisticsKind::none;
    }
}

template <class Kernel, ForwardInstance kInstance>
struct ForwardTraits {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr int kHeadDim = config.head_dim, kHeadDimV = config.head_dim_v;
    static constexpr bool kRareOptions = kInstance == ForwardInstance::general;
    static constexpr RowStatisticsKind kStatisticsKind = row_statistics_kind(kInstance);
    static constexpr bool kStatistics = kStatisticsKind != RowStatisticsKind::none;
    static constexpr bool kBlockMask =  // iterates over a block mask
        kRareOptions || kInstance == ForwardInstance::statistics || kInstance == ForwardInstance::block_mask;
    static constexpr bool kDynamic = !is_plain(kInstance);
    static constexpr bool kLongSums = forward_has_long_sums(config, kInstance);
    static constexpr bool kInvariant = kInstance == ForwardInstance::invariant;
    static constexpr bool kCodes = kInstance == ForwardInstance::codes;  // a warpgroup of its own converts keys and values
    static constexpr bool kCopied = kCodes || kInstance == ForwardInstance::copied;               // or copies them
    static constexpr bool kCache = kCopied || kInvariant || kInstance == ForwardInstance::cache;  // they are in a cache
    // Warps that load or convert. Over a cache: one for Q and K, one for V; or one for Q and four for keys and values, with two
    // more that load codes.
    static constexpr int kProducerWarps = kCopied ? (kCodes ? 7 : 5) : (kCache ? 2 : 1);
    // Arrivals at the barrier of a stage of K or V that say that it is full. Copies: of each lane, and one more of each warp.
    static constexpr int kArrivalsOfLoads = kCodes ? 4 * kArrivalsOfWarp : (kCopied ? 4 * 33 : 1);
    // Whether decode kernels can run at the same time (prefill_share.cuh). With invariant rows there are too few registers.
    static constexpr bool kBesideDecode = kCache && !kInvariant;
    static constexpr bool kPairs =
        kBesideDecode && !kCopied && prefill_has_pairs(config);  // thread blocks can work in pairs (block_pair.cuh)
    using Params =
        std::conditional_t<kCache, PrefillParams, std::conditional_t<kStatistics, ForwardStatisticsParams, ForwardParams>>;

    static constexpr int kBlockM = forward_tile_q(config, kInstance), kBlockN = forward_tile_k(config, kInstance);
    static constexpr int kGroupRows = ForwardConsumerThread::kGroupRows, kGroups = kBlockM / kGroupRows;  // consumer warpgroups
    static constexpr int kConsumerWarps = kGroups * 4, kThreads = (kGroups + 1 + kCopied) * 128;
    using QTile = SwizzledTile<kGroupRows, kHeadDim>;
    using KTile = SwizzledTile<kBlockN, kHeadDim>;
    using VTile = SwizzledTile<kBlockN, kHeadDimV>;
    using OutTile = SwizzledTile<ForwardConsumerThread::kWarpRows, kHeadDimV>;  // one per consumer warp

    // Iteration over a block mask and loads from a cache need more registers in the producer warp. It has more registers where
    // the consumers need fewer.
    static constexpr bool kMoreProducerRegisters =
        kBlockMask ? !(kRareOptions && (kHeadDimV == 96 || kHeadDimV == 256)) : kCache && !kCopied && kHeadDim <= 96;
    static constexpr int kProducerRegisters = kMoreProducerRegisters ? 56 : (kCodes ? 48 : (kGroups == 3 || kCopied ? 32 : 40)),
                         kCopyRegisters = kCodes ? 48 : 64,
                         kConsumerRegisters = kCopied ? 208 : (kGroups == 3 ? 160 : 232) - (kMoreProducerRegisters ? 8 : 0);

    // Which code the consumers have for the first tile: begin_first_work_tile or begin_with_zero_probabilities.
    static constexpr bool kSeparateFirstTile = kGroups == 3;
    // Whether a consumer warpgroup without rows in a work tile skips it. This needs kSeparateFirstTile.
    static constexpr bool kSkipsWorkTiles = kSeparateFirstTile;
    // Whether the consumers compute the TileInfo of a tile before they wait for its scores, or after. This affects only the
    // speed.
    static constexpr bool kTileInfoBeforeWait = kHeadDim == 128;

    // Whether a stage of K has room for the bias or the boolean mask of its keys (forward_bias_tile.cuh).
    static constexpr bool kBiasTiles = kRareOptions && kHeadDim <= 64;
    static_assert(!kBiasTiles || kBlockN == 128, "the swizzle of the mask needs rows of 128 bytes");
    using BiasTile = ForwardBiasTile<kBlockM, kBlockN>;
    static constexpr int kBiasTileBytes = kBiasTiles ? BiasTile::kBytes : 0;

    // Stages of tiles of K and V as codes.
    static constexpr int kCodeStages = kCodes ? 3 : 0, kCodeBytes = kBlockN * kHeadDim;
    static constexpr int kMaxSharedBytes = 227 * 1024;  // of a thread block
    // Of these for ForwardSharedStorage and alignment; copied keys have scales there (forward_shared_storage.cuh).
    static constexpr int kStorageBytes = 3 * 1024 + (kCopied ? 2 * config.stages * kBlockN * 8 : 0) + kCodeStages * kBlockN * 8;
    // With pairs of thread blocks a stage waits for more consumers and loads. A third stage takes the place of the output tiles.
    // With bias tiles there is room for three stages.
    static constexpr int kStages = kBiasTiles ? 3 : config.stages + (kPairs && kHeadDim == 128 ? 1 : 0);
    static constexpr int kQBytes = kGroups * QTile::kBytes, kOutBytes = kConsumerWarps * OutTile::kBytes;
    static constexpr int kMinTileBytes =
        kQBytes + kStages * (KTile::kBytes + VTile::kBytes + kBiasTileBytes) + kCodeStages * kCodeBytes;
    // Spare shared memory is used, in this order, for: output tiles, so that TMA stores the output; a third stage of V; a second
    // stage of Q, so that Q of the next work tile is loaded before the current one is done.
    static constexpr int kSpareBytes = kMaxSharedBytes - kStorageBytes - kMinTileBytes;
    static_assert(kSpareBytes >= 0);
    static constexpr bool kTmaStore = !kCopied && kSpareBytes >= kOutBytes;  // copied keys: a third stage of V is worth more
    static constexpr int kVStages =
        kStages + (kStages == 2 && kSpareBytes >= (kTmaStore ? kOutBytes : 0) + VTile::kBytes ? 1 : 0);
    static constexpr int kQStages =
        kTmaStore && kSpareBytes >= kOutBytes + (kVStages - kStages) * VTile::kBytes + kQBytes ? 2 : 1;
    // Invariant rows: how many accumulators of a consumer thread are in shared memory (invariant_sums.cuh): in the output tile of
    // the warp or, without an output tile, in the shared memory that remains.
    static constexpr int kSumsInShared = !kInvariant || kHeadDimV <= 64 ? 0 : (kHeadDimV == 128 && kTmaStore ? 32 : 16),
                         kSumsOfWarpBytes = kSumsInShared * 4 * 32;
    static_assert(!kTmaStore || kSumsOfWarpBytes <= OutTile::kBytes);
    static constexpr int kTileBytes = kQStages * kQBytes + kStages * KTile::kBytes + kVStages * VTile::kBytes +
                                      kStages * kBiasTileBytes + kCodeStages * kCodeBytes +
                                      (kTmaStore ? kOutBytes : kConsumerWarps * kSumsOfWarpBytes);
};

}  // namespace libflash::cuda::sm90
