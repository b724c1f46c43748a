// The shared memory of the sm_90a forward kernel for wide heads: first the tiles, then barriers, the work tile, and the data that
// the warpgroups exchange.
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/sm90/consumer_exchanges.cuh"
#include "cuda/sm90/forward_tensor_maps.cuh"
#include "cuda/sm90/forward_wide_traits.cuh"
#include "cuda/sm90/kernel_context.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace libflash::cuda::sm90 {

// Shared addresses of the tiles.
template <class Traits>
struct ForwardWideTiles {
    static constexpr int kBytes = Traits::kTileBytes;
    uint32_t q;

    __device__ __forceinline__ explicit ForwardWideTiles(const char* memory) : q(shared_address(memory)) {}
    __device__ __forceinline__ uint32_t k() const { return q + Traits::QTile::kBytes; }
    __device__ __forceinline__ uint32_t v() const { return k() + Traits::KTile::kBytes; }
    __device__ __forceinline__ uint32_t p(int buffer) const {
        return v() + Traits::VTile::kBytes + buffer * Traits::PTile::kBytes;
    }
};

// One query tile of one head. Its key tiles are processed in ascending order: thread blocks of one head then read the same keys
// at the same time, even under a causal mask.
template <class Traits>
struct ForwardWideWorkTile {
    static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;

    TileCoordinates at;
    SequenceRows q_rows;
    int first_key;  // first row of its sequence in K and V
    int kv_head;
    KeyRange<kBlockM, kBlockN> keys;
    int unmasked_begin, unmasked_end;  // all rows see all keys of these tiles

    __device__ __forceinline__ void init(const ForwardParams& params, const TileCoordinates& work, const SequenceRows& rows) {
        const SequenceRows k_rows = SequenceRows::of(params.k_lengths, work.batch);
        at = work;
        q_rows = rows;
        first_key = k_rows.start;
        kv_head = work.head / params.group_size;
        keys.init(params.mask, work.tile, q_rows.length, k_rows.length);
        const int diagonal = keys.first_row + keys.shift;
        unmasked_begin = (max(diagonal + kBlockM - 1 - keys.left, 0) + kBlockN - 1) / kBlockN;
        unmasked_end = max(min(keys.length_k, diagonal + keys.right + 1), 0) / kBlockN;
    }
    __device__ __forceinline__ int tiles() const { return keys.end - keys.begin; }
    __device__ __forceinline__ int first_key_of(int number) const { return (keys.begin + number) * kBlockN; }
    __device__ __forceinline__ bool is_edge(int number) const {
        const int tile = keys.begin + number;
        return tile < unmasked_begin || tile >= unmasked_end;
    }
};

template <class Traits>
struct ForwardWideStorage {
    uint64_t q_full;
    // A chunk of K is read by the warpgroup that computes the scores of the tile. Each warpgroup has its own full barriers: a
    // wait tests only the parity of a phase, so a warpgroup must wait for every phase.
    uint64_t k_full[Traits::kGroups][Traits::kChunks], k_empty[Traits::kChunks];
    uint64_t v_full[Traits::kAllPieces], v_empty[Traits::kAllPieces];
    ForwardWideWorkTile<Traits> work_tile;
    float maximum[Traits::kPBuffers][Traits::kBlockM];  // the kept maxima with which P was computed
    ConsumerExchanges<Traits> exchanges;

    // One thread calls it.
    __device__ __forceinline__ void init() {
        MBarrier{shared_address(&q_full)}.init(1);
        for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
            for (int group = 0; group < Traits::kGroups; ++group) full_of_k(group, chunk).init(1);
            empty_of_k(chunk).init(4 * kArrivalsOfWarp);
        }
        for (int piece = 0; piece < Traits::kAllPieces; ++piece) {
            full_of_v(piece).init(1);
            empty_of_v(piece).init(4 * kArrivalsOfWarp);
        }
        exchanges.init();
        fence_barrier_init();
    }
    __device__ __forceinline__ MBarrier full_of_q() const { return {shared_address(&q_full)}; }
    __device__ __forceinline__ MBarrier full_of_k(int group, int chunk) const { return {shared_address(&k_full[group][chunk])}; }
    __device__ __forceinline__ MBarrier empty_of_k(int chunk) const { return {shared_address(&k_empty[chunk])}; }
    __device__ __forceinline__ MBarrier full_of_v(int piece) const { return {shared_address(&v_full[piece])}; }
    __device__ __forceinline__ MBarrier empty_of_v(int piece) const { return {shared_address(&v_empty[piece])}; }
};

// The context that all parts of the kernel use.
template <class Traits>
using ForwardWideContext = KernelContext<ForwardParams, ForwardTensorMaps, ForwardWideStorage<Traits>, ForwardWideTiles<Traits>>;

// Chunks of Q and K that hold channels of the call; the kernel may have more.
template <class Traits>
__device__ __forceinline__ int used_chunks(const ForwardParams& params) {
    constexpr int kCols = Traits::KTile::kChunkCols;
    return (params.head_dim + kCols - 1) / kCols;
}

}  // namespace libflash::cuda::sm90
