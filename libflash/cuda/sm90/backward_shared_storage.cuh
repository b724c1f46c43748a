// The shared memory of the sm_90a backward kernel: first the tiles (BackwardSharedTiles), then barriers and what the warps share
// (BackwardSharedStorage): the work tile of the thread block, one key tile of one key head.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/sm90/backward_traits.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/query_tile_range.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

// K, V; stages of Q and dO; stages of dS (and of P, where the consumer warpgroups divide the products); softmax statistics of all
// stages; dQ on its way to the accumulator.
template <class Traits>
struct BackwardSharedTiles {
    static constexpr int kStageBytes = 2 * Traits::QTile::kBytes;
    static constexpr int kStatisticsBytes = Traits::kBlockM * static_cast<int>(sizeof(SoftmaxStatistics));
    static constexpr int kStagesAt = 2 * Traits::KvTile::kBytes;
    static constexpr int kScoresAt = kStagesAt + Traits::kStages * kStageBytes;
    static constexpr int kStatisticsAt = kScoresAt + Traits::kScoreStages * Traits::ScoreTile::kBytes;
    static constexpr int kSumsAt = kStatisticsAt + Traits::kStages * kStatisticsBytes;
    static constexpr int kBytes = kSumsAt + Traits::kSumBuffers * 4 * Traits::kSumBytes;

    char* memory;

    // The shared address of K, from which those of the other tiles follow.
    __device__ __forceinline__ uint32_t k() const { return shared_address(memory); }
    __device__ static __forceinline__ uint32_t v(uint32_t k) { return k + Traits::KvTile::kBytes; }
    __device__ static __forceinline__ uint32_t q(uint32_t k, int stage) { return k + kStagesAt + stage * kStageBytes; }
    __device__ static __forceinline__ uint32_t dout_of(uint32_t q) { return q + Traits::QTile::kBytes; }
    __device__ static __forceinline__ uint32_t ds(uint32_t k, int stage) {
        return k + kScoresAt + stage * Traits::ScoreTile::kBytes;
    }
    __device__ static __forceinline__ uint32_t sums(uint32_t k) { return k + kSumsAt; }
    __device__ __forceinline__ uint32_t v() const { return v(k()); }
    __device__ __forceinline__ uint32_t q(int stage) const { return q(k(), stage); }
    __device__ __forceinline__ uint32_t dout(int stage) const { return dout_of(q(stage)); }
    __device__ __forceinline__ const SoftmaxStatistics* statistics(int stage) const {
        return reinterpret_cast<const SoftmaxStatistics*>(memory + kStatisticsAt + stage * kStatisticsBytes);
    }
};

template <class Traits>
struct BackwardSharedStorage {
    static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    using Position = std::conditional_t<Traits::kBlockMask, VisibleTilePosition, QueryTilePosition>;
    // Where only the device knows a length: rows from this one on of the key tile, and of the sequence's queries, may hold other
    // data when they are loaded. Else no row.
    struct LoadedRows {
        int keys, queries;
    };

    uint64_t keys_full;                                // full barrier of K and V
    PipelineBarriers<Traits::kStages> queries;         // Q, dO and softmax statistics
    PipelineBarriers<Traits::kScoreStages> gradients;  // dS
    // Fixed order: whether dQ is in a buffer, on its way to the accumulator. A barrier for the even tiles and one for the odd
    // ones, because a thread that waits for only some of a barrier's phases could take one for another.
    uint64_t sums_full[2][Traits::kSumBuffers];
    uint64_t sums_empty[Traits::kSumBuffers];
    LoadedRows loaded;
    TileCoordinates work;  // head: a key head; batch < 0: no work
    SequenceRows q_rows, k_rows;
    QueryTiles<kBlockM, kBlockN> tiles;
    QueryTileRange<kBlockM, kBlockN> range;
    uint64_t probabilities_full[Traits::kScoreStages];  // P in a stage of dS, where the consumer warpgroups divide the products
    int number;                                         // of the thread block in its launch

    // kInitThreads threads call it before the warpgroups take their roles: finding a packed tile takes a warp.
    static constexpr int kInitThreads = Traits::kRagged ? 32 : 1;
    __device__ __forceinline__ void init(const BackwardParams& params) {
        if constexpr (Traits::kRagged) {
            const int index = __shfl_sync(0xffffffffu, threadIdx.x == 0 ? take_work_tile(params) : 0, 0);
            const TileCoordinates found = tile_coordinates<kBlockN>(params.key_schedule, params.k_lengths, params.batch, index);
            if (threadIdx.x != 0) return;
            init_barriers();
            init_work(params, found);
        } else {
            init_barriers();
            init_work(params,
                      tile_coordinates<kBlockN>(params.key_schedule, params.k_lengths, params.batch, take_work_tile(params)));
        }
    }
    __device__ __forceinline__ MBarrier sum_is_full(int odd, int buffer) const {
        return {shared_address(&sums_full[odd][buffer])};
    }
    __device__ __forceinline__ MBarrier sum_is_empty(int buffer) const { return {shared_address(sums_empty + buffer)}; }
    __device__ __forceinline__ MBarrier keys() const { return {shared_address(&keys_full)}; }
    __device__ __forceinline__ MBarrier probabilities(int stage) const { return {shared_address(probabilities_full + stage)}; }
    // The first query head.
    __device__ __forceinline__ int first_head(const BackwardParams& params) const {
        return work.head * params.group_size + params.part.first_head;
    }
    __device__ __forceinline__ QueryTilePosition first_position(const BackwardParams& params) const {
        return range.first(first_head(params), params.part.heads);
    }
    __device__ __forceinline__ int64_t first_unit(const BackwardParams& params, const QueryTilePosition& at) const {
        return QueryUnits::first(params, work.batch, at.head, q_rows.start);
    }
    // The first row of the key tile in K and V, and that of a query tile in Q and dO.
    __device__ __forceinline__ int key_row() const { return (Traits::kRagged ? k_rows.start : 0) + tiles.first_col; }
    __device__ __forceinline__ int query_row(int tile) const { return (Traits::kRagged ? q_rows.start : 0) + tile * kBlockM; }

private:
    // The number of the work tile. Under a fixed order a thread block waits for those with smaller numbers, so these must have
    // begun before it.
    __device__ __forceinline__ int take_work_tile(const BackwardParams& params) {
        const BackwardPart& part = params.part;
        number =
            Traits::kFixedOrder ? atomicAdd(params.next_work_tile, 1) - part.thread_blocks_before : static_cast<int>(blockIdx.x);
        return part.first_work_tile + number;
    }
    __device__ __forceinline__ void init_barriers() {
        keys().init(1);
        queries.init(Traits::kConsumerWarps);
        gradients.init(4, Traits::kBlockN / 16);
        if constexpr (Traits::kDividesProducts)
            for (int i = 0; i < Traits::kScoreStages; ++i) probabilities(i).init(4);
        for (int buffer = 0; buffer < (Traits::kFixedOrder ? Traits::kSumBuffers : 0); ++buffer) {
            sum_is_full(0, buffer).init(4);
            sum_is_full(1, buffer).init(4);
            sum_is_empty(buffer).init(1);
        }
        fence_barrier_init();
    }
    __device__ __forceinline__ void init_work(const BackwardParams& params, const TileCoordinates& found) {
        work = found;
        if (Traits::kRagged && work.batch < 0) return;
        q_rows = SequenceRows::of(params.q_lengths, work.batch);
        const SequenceRows keys_of_sequence = SequenceRows::of(params.k_lengths, work.batch);
        tiles.init(params, work, q_rows.length, keys_of_sequence.length);
        range = QueryTileRange<kBlockM, kBlockN>::of(tiles);
        if constexpr (Traits::kRagged) {
            k_rows = keys_of_sequence;
            const auto on_device = [](const LengthsParams& lengths) { return lengths.cu || lengths.used; };
            loaded.keys = on_device(params.k_lengths) ? max(k_rows.length - tiles.first_col, 0) : kBlockN;
            loaded.queries = on_device(params.q_lengths) ? q_rows.length : INT32_MAX;
        }
    }
};

}  // namespace libflash::cuda::sm90
