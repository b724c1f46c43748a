// The shared memory of the sm_90a backward kernels for wide heads: first the tiles, then barriers, the work tile, and statistics.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/sm90/backward_wide_tensor_maps.cuh"
#include "cuda/sm90/backward_wide_work_tile.cuh"
#include "cuda/sm90/consumer_exchanges.cuh"
#include "cuda/sm90/kernel_context.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

// Shared addresses of the tiles.
template <class Traits>
struct BackwardWideTiles {
    static constexpr int kBytes = Traits::kTileBytes;
    uint32_t rows;  // of S

    __device__ __forceinline__ explicit BackwardWideTiles(const char* memory) : rows(shared_address(memory)) {}
    // The rows that are multiplied by the streamed tensor; for dv the rows of S.
    __device__ __forceinline__ uint32_t rows_of_streamed() const {
        return rows + (Traits::kRowTensors - 1) * Traits::Tile::kBytes;
    }
    __device__ __forceinline__ uint32_t added() const { return rows + Traits::kRowTensors * Traits::Tile::kBytes; }
    __device__ __forceinline__ uint32_t streamed(int stage) const {
        return added() + Traits::Tile::kBytes + stage * Traits::Tile::kChunkBytes;
    }
    __device__ __forceinline__ uint32_t weights(int buffer) const {
        return streamed(Traits::kStreamStages) + buffer * Traits::WeightTile::kBytes;
    }
};

template <class Traits>
struct BackwardWideStorage {
    // The statistics of the columns, if these are queries. Each warpgroup has a buffer for the tiles whose weights it computes.
    SoftmaxStatistics statistics[Traits::kGroups][64];
    uint64_t rows_full;
    uint64_t added_full[Traits::kChunks], added_empty[Traits::kAllPieces];
    // Only the warpgroup that computes the weights of a tile reads its chunks. Each warpgroup has its own full barriers: a wait
    // tests only the parity of a phase, so a warpgroup must wait for every phase.
    uint64_t streamed_full[Traits::kGroups][Traits::kStreamStages], streamed_empty[Traits::kStreamStages];
    uint64_t statistics_full[Traits::kGroups], statistics_empty[Traits::kGroups];
    BackwardWideWorkTile<Traits> work_tile;
    ConsumerExchanges<Traits> exchanges;

    // One thread calls it.
    __device__ __forceinline__ void init() {
        constexpr int kOneGroup = 4 * kArrivalsOfWarp;
        full_of_rows().init(1);
        for (int chunk = 0; chunk < Traits::kChunks; ++chunk) full_of_added(chunk).init(1);
        for (int piece = 0; piece < Traits::kAllPieces; ++piece) empty_of_added(piece).init(kOneGroup);
        for (int stage = 0; stage < Traits::kStreamStages; ++stage) empty_of_streamed(stage).init(kOneGroup);
        for (int group = 0; group < Traits::kGroups; ++group) {
            for (int stage = 0; stage < Traits::kStreamStages; ++stage) full_of_streamed(group, stage).init(1);
            full_of_statistics(group).init(1);
            empty_of_statistics(group).init(kOneGroup);
        }
        exchanges.init();
        fence_barrier_init();
    }
    __device__ __forceinline__ MBarrier full_of_rows() const { return {shared_address(&rows_full)}; }
    __device__ __forceinline__ MBarrier full_of_added(int chunk) const { return {shared_address(&added_full[chunk])}; }
    __device__ __forceinline__ MBarrier empty_of_added(int piece) const { return {shared_address(&added_empty[piece])}; }
    __device__ __forceinline__ MBarrier full_of_streamed(int group, int stage) const {
        return {shared_address(&streamed_full[group][stage])};
    }
    __device__ __forceinline__ MBarrier empty_of_streamed(int stage) const { return {shared_address(&streamed_empty[stage])}; }
    __device__ __forceinline__ MBarrier full_of_statistics(int group) const { return {shared_address(&statistics_full[group])}; }
    __device__ __forceinline__ MBarrier empty_of_statistics(int group) const {
        return {shared_address(&statistics_empty[group])};
    }
};

// The context that all parts of a kernel use.
template <class Traits>
using BackwardWideContext =
    KernelContext<BackwardParams, BackwardWideTensorMaps, BackwardWideStorage<Traits>, BackwardWideTiles<Traits>>;

// The number of chunks that hold channels of the call, for S and for the product with the streamed tensor. The kernel may have
// more.
__device__ __forceinline__ int chunks_of(int channels) { return (channels + 63) / 64; }
__device__ __forceinline__ int score_chunks(const BackwardParams& params) { return chunks_of(params.head_dim); }
template <class Traits>
__device__ __forceinline__ int streamed_chunks(const BackwardParams& params) {
    return chunks_of(Traits::kDifferences ? params.head_dim_v : params.head_dim);
}
// The n-th chunk of the added tensor to be loaded: the first pieces of both warpgroups are loaded before the second pieces.
template <class Traits>
__device__ __forceinline__ int added_chunk(int n) {
    const int in_order = n / Traits::kPieceChunks,
              piece = in_order % Traits::kGroups * Traits::kPieces + in_order / Traits::kGroups;
    return piece * Traits::kPieceChunks + n % Traits::kPieceChunks;
}

}  // namespace libflash::cuda::sm90
