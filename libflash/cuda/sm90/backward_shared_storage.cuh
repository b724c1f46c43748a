// The shared memory of the sm_90a backward kernel: first the tiles (BackwardSharedTiles), then barriers and what the warps share
// (BackwardSharedStorage): the work tile of the thread block, one key tile of one key head.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/sm90/backward_traits.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/query_tile_range.cuh"

namespace libflash::cuda::sm90 {

// K, V; stages of Q and dO; stages of dS; softmax statistics of all stages.
template <class Traits>
struct BackwardSharedTiles {
    static constexpr int kStageBytes = 2 * Traits::QTile::kBytes;
    static constexpr int kStatisticsBytes = Traits::kBlockM * static_cast<int>(sizeof(SoftmaxStatistics));
    static constexpr int kStagesAt = 2 * Traits::KvTile::kBytes;
    static constexpr int kScoresAt = kStagesAt + Traits::kStages * kStageBytes;
    static constexpr int kStatisticsAt = kScoresAt + Traits::kScoreStages * Traits::ScoreTile::kBytes;
    static constexpr int kBytes = kStatisticsAt + Traits::kStages * kStatisticsBytes;

    char* memory;

    __device__ __forceinline__ uint32_t k() const { return shared_address(memory); }
    __device__ __forceinline__ uint32_t v() const { return k() + Traits::KvTile::kBytes; }
    __device__ __forceinline__ uint32_t q(int stage) const { return k() + kStagesAt + stage * kStageBytes; }
    __device__ __forceinline__ uint32_t dout(int stage) const { return q(stage) + Traits::QTile::kBytes; }
    __device__ __forceinline__ uint32_t ds(int stage) const { return k() + kScoresAt + stage * Traits::ScoreTile::kBytes; }
    __device__ __forceinline__ const SoftmaxStatistics* statistics(int stage) const {
        return reinterpret_cast<const SoftmaxStatistics*>(memory + kStatisticsAt + stage * kStatisticsBytes);
    }
};

template <class Traits>
struct BackwardSharedStorage {
    static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    // The next tile to load. The producer thread keeps it in shared memory, because it has few registers.
    struct LoadState {
        QueryTilePosition at;
        int stage, phase;  // of the pipeline
    };

    uint64_t keys_full;                                // full barrier of K and V
    PipelineBarriers<Traits::kStages> queries;         // Q, dO and softmax statistics
    PipelineBarriers<Traits::kScoreStages> gradients;  // dS
    LoadState loads;
    TileCoordinates work;  // head: a key head
    SequenceRows q_rows;
    QueryTiles<kBlockM, kBlockN> tiles;
    QueryTileRange<kBlockM, kBlockN> range;

    // One thread calls it before the warpgroups take their roles.
    __device__ __forceinline__ void init(const BackwardParams& params) {
        keys().init(1);
        queries.init(Traits::kConsumerWarps);
        gradients.init(4, Traits::kConsumerWarps);
        fence_barrier_init();
        work = tile_coordinates<kBlockN>(params.key_schedule, params.k_lengths, params.batch);
        q_rows = SequenceRows::of(params.q_lengths, work.batch);
        tiles.init(params, work, q_rows.length, SequenceRows::of(params.k_lengths, work.batch).length);
        range = QueryTileRange<kBlockM, kBlockN>::of(tiles);
    }
    __device__ __forceinline__ MBarrier keys() const { return {shared_address(&keys_full)}; }
    __device__ __forceinline__ QueryTilePosition first_position(const BackwardParams& params) const {
        return range.first(work.head * params.group_size, params.group_size);
    }
    __device__ __forceinline__ int64_t first_unit(const BackwardParams& params, const QueryTilePosition& at) const {
        return QueryUnits::first(params, work.batch, at.head, q_rows.start);
    }
};

}  // namespace libflash::cuda::sm90
