// The shared memory of the sm_90a backward_tangent kernels: first the tiles, then barriers and work tiles.
#pragma once

#include "cuda/sm90/backward_tangent_tensor_maps.cuh"
#include "cuda/sm90/backward_tangent_traits.cuh"
#include "cuda/sm90/backward_tangent_work_tile.cuh"
#include "cuda/sm90/exchange_barrier.cuh"
#include "cuda/sm90/kernel_context.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

// Shared addresses of the tiles. Tensors of the rows have the numbers 0 to 3, in the order of backward_tangent_traits.cuh.
template <class Traits>
struct BackwardTangentSharedTiles {
    static constexpr int kBytes = Traits::kTileBytes, kFirstBytes = Traits::ColTile::kBytes;
    static constexpr bool kOneSecond = Traits::kSecondStages == 1;  // otherwise each stage has both tensors of its columns
    uint32_t rows_smem;

    __device__ __forceinline__ explicit BackwardTangentSharedTiles(const char* memory) : rows_smem(shared_address(memory)) {}
    __device__ __forceinline__ uint32_t rows(int tensor, int group) const {
        return rows_smem + (tensor * Traits::kGroups + group) * Traits::RowTile::kBytes;
    }
    __device__ __forceinline__ uint32_t first_cols(int stage) const {
        return rows_smem + Traits::kRowBytes + stage * (kOneSecond ? kFirstBytes : Traits::kStageBytes);
    }
    __device__ __forceinline__ uint32_t second_cols(int stage) const {
        return kOneSecond ? rows_smem + Traits::kRowBytes + Traits::kStages * kFirstBytes : first_cols(stage) + kFirstBytes;
    }
    // TangentStatistics of the columns, if these are queries.
    __device__ __forceinline__ uint32_t statistics(int stage) const {
        return rows_smem + Traits::kTileBytes - (Traits::kStages - stage) * Traits::kStatisticsBytes;
    }
};

template <class Traits>
struct BackwardTangentStorage {
    PipelineBarriers<Traits::kStages> columns;
    PipelineBarriers<Traits::kStages> second_columns;  // kWide: of the second tensor of the columns, else not used
    PipelineBarriers<1> rows;
    uint64_t merge;  // kWide: of the exchange barrier
    // The producer writes work tile n after all consumers have released the rows of n - 1; then none reads n - 2 any more.
    BackwardTangentWorkTile<Traits> work_tiles[2];

    // One thread calls it before the warps take their roles.
    __device__ __forceinline__ void init() {
        columns.init(Traits::kColumnWarps * kArrivalsOfWarp);
        if constexpr (Traits::kWide) {
            second_columns.init(Traits::kColumnWarps * kArrivalsOfWarp);
            MBarrier{shared_address(&merge)}.init(32 * Traits::kConsumerWarps);
        }
        rows.init(Traits::kConsumerWarps * kArrivalsOfWarp);
        fence_barrier_init();
    }
};

// The context that all parts of the kernels use.
template <class Traits>
using BackwardTangentContext = KernelContext<BackwardTangentParams, BackwardTangentTensorMaps, BackwardTangentStorage<Traits>,
                                             BackwardTangentSharedTiles<Traits>>;

}  // namespace libflash::cuda::sm90
