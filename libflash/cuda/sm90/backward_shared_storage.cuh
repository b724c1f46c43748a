// The shared memory of the sm_90a backward kernel: first the tiles (BackwardSharedTiles), then barriers and the data that the
// warps share (BackwardSharedStorage): the current and the next work tile of the thread block.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/sm90/backward_traits.cuh"
#include "cuda/sm90/backward_work_tile.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

// Stages of K and V; stages of Q and dO; stages of dS (and of P, where the consumer warpgroups divide the products); softmax
// statistics of all stages; dQ on its way to the accumulator.
template <class Traits>
struct BackwardSharedTiles {
    static constexpr int kStageBytes = 2 * Traits::QTile::kBytes;
    static constexpr int kStatisticsBytes = Traits::kBlockM * static_cast<int>(sizeof(SoftmaxStatistics));
    static constexpr int kKeyStageBytes = 2 * Traits::KvTile::kBytes;
    static constexpr int kStagesAt = Traits::kKeyStages * kKeyStageBytes;
    static constexpr int kScoresAt = kStagesAt + Traits::kStages * kStageBytes;
    static constexpr int kStatisticsAt = kScoresAt + Traits::kScoreStages * Traits::ScoreTile::kBytes;
    static constexpr int kSumsAt = kStatisticsAt + Traits::kStages * kStatisticsBytes;
    static constexpr int kBytes = kSumsAt + Traits::kSumBuffers * 4 * Traits::kSumBytes;

    char* memory;

    // Shared addresses. `tiles` is the address of all tiles, from which the other addresses are computed.
    __device__ __forceinline__ uint32_t address() const { return shared_address(memory); }
    __device__ static __forceinline__ uint32_t k(uint32_t tiles, int stage) {
        return Traits::kKeyStages == 1 ? tiles : tiles + stage * kKeyStageBytes;
    }
    __device__ static __forceinline__ uint32_t v_of(uint32_t k) { return k + Traits::KvTile::kBytes; }
    __device__ static __forceinline__ uint32_t q(uint32_t tiles, int stage) { return tiles + kStagesAt + stage * kStageBytes; }
    __device__ static __forceinline__ uint32_t dout_of(uint32_t q) { return q + Traits::QTile::kBytes; }
    __device__ static __forceinline__ uint32_t ds(uint32_t tiles, int stage) {
        return tiles + kScoresAt + stage * Traits::ScoreTile::kBytes;
    }
    __device__ static __forceinline__ uint32_t sums(uint32_t tiles) { return tiles + kSumsAt; }
    __device__ __forceinline__ uint32_t q(int stage) const { return q(address(), stage); }
    __device__ __forceinline__ uint32_t dout(int stage) const { return dout_of(q(stage)); }
    __device__ __forceinline__ const SoftmaxStatistics* statistics(int stage) const {
        return reinterpret_cast<const SoftmaxStatistics*>(memory + kStatisticsAt + stage * kStatisticsBytes);
    }
};

template <class Traits>
struct BackwardSharedStorage {
    static constexpr int kReaders =
        3 * 128 + (Traits::kFixedOrder ? 2 : 0);  // threads that read work tiles, without the producer

    BackwardWorkTile<Traits> work_tiles[2];
    PipelineBarriers<2> tiles;  // work_tiles
    PipelineBarriers<Traits::kKeyStages> k, v;
    PipelineBarriers<Traits::kStages> queries;         // Q, dO and softmax statistics
    PipelineBarriers<Traits::kScoreStages> gradients;  // dS
    // Fixed order: whether a buffer holds sums of dQ for the accumulator. Even and odd tiles have separate barriers, because a
    // thread that does not wait for every phase of a barrier could mistake one phase for another.
    uint64_t sums_full[2][Traits::kSumBuffers];
    uint64_t sums_empty[Traits::kSumBuffers];
    uint64_t probabilities_full[Traits::kScoreStages];  // P in a stage of dS, where the consumer warpgroups divide the products

    __device__ __forceinline__ MBarrier tile_full(int slot) const { return {shared_address(tiles.full + slot)}; }
    __device__ __forceinline__ MBarrier tile_empty(int slot) const { return {shared_address(tiles.empty + slot)}; }
    __device__ __forceinline__ MBarrier k_full(int stage) const { return {shared_address(k.full + stage)}; }
    __device__ __forceinline__ MBarrier k_empty(int stage) const { return {shared_address(k.empty + stage)}; }
    __device__ __forceinline__ MBarrier v_full(int stage) const { return {shared_address(v.full + stage)}; }
    __device__ __forceinline__ MBarrier v_empty(int stage) const { return {shared_address(v.empty + stage)}; }
    __device__ __forceinline__ MBarrier sum_is_full(int odd, int buffer) const {
        return {shared_address(&sums_full[odd][buffer])};
    }
    __device__ __forceinline__ MBarrier sum_is_empty(int buffer) const { return {shared_address(sums_empty + buffer)}; }
    __device__ __forceinline__ MBarrier probabilities(int stage) const { return {shared_address(probabilities_full + stage)}; }

    // Called by one thread before the warpgroups take their roles.
    __device__ __forceinline__ void init() {
        tiles.init(kReaders);
        k.init(Traits::kWarpsThatReadK);
        v.init(Traits::kWarpsThatReadV);
        queries.init(Traits::kConsumerWarps * kArrivalsOfWarp);
        // A stage of dS is released by the four warps of the dQ warpgroup, and filled by warps that have 16 keys each.
        gradients.init(4, Traits::kBlockN / 16);
        if constexpr (Traits::kDividesProducts)
            for (int i = 0; i < Traits::kScoreStages; ++i) probabilities(i).init(4);
        // A buffer is filled by the four warps of the dQ warpgroup, and released by the thread that adds its sums.
        for (int buffer = 0; buffer < (Traits::kFixedOrder ? Traits::kSumBuffers : 0); ++buffer) {
            sum_is_full(0, buffer).init(4);
            sum_is_full(1, buffer).init(4);
            sum_is_empty(buffer).init(1);
        }
        fence_barrier_init();
    }
};

}  // namespace libflash::cuda::sm90
