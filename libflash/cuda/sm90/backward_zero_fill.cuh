// Zeroes rows in shared memory that lie beyond a sequence, as TMA does beyond a tensor. Where only the device knows the lengths,
// such rows hold data of others, possibly NaN or infinity, and products would multiply these by 0. With zeros there, everything
// else is as it is at the end of a tensor.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm90/backward_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardZeroFill {
    using KvTile = typename Traits::KvTile;
    using QTile = typename Traits::QTile;
    static constexpr int kKeysBarrier = 8, kGroupBarrier = 9;  // named barriers that nothing else uses; one for each warpgroup

    const BackwardContext<Traits>& context;

    // The dQ warpgroup and the consumers call it when K and V have arrived.
    __device__ __forceinline__ void keys() const {
        if constexpr (Traits::kRagged) {
            const int end = context.storage.loaded.keys;
            if (end >= Traits::kBlockN) return;
            constexpr int kThreads = Traits::kThreads - 128;
            const int thread = static_cast<int>(threadIdx.x) - 128;
            write_zeros<KvTile, Traits::kBlockN, kThreads>(context.tiles.k(), end, thread);
            write_zeros<KvTile, Traits::kBlockN, kThreads>(context.tiles.v(), end, thread);
            fence_shared_for_async();
            __syncwarp();
            named_barrier_wait(kKeysBarrier, kThreads);
        }
    }
    // A consumer warpgroup calls it when Q and dO of a tile have arrived in a stage. Every warpgroup writes all zeros, so none
    // waits for another.
    __device__ __forceinline__ void queries(int stage, int tile) const {
        if constexpr (Traits::kRagged) {
            const int end = context.storage.loaded.queries - tile * Traits::kBlockM;
            if (end >= Traits::kBlockM) return;
            const int thread = static_cast<int>(threadIdx.x % 128);
            write_zeros<QTile, Traits::kBlockM, 128>(context.tiles.q(stage), end, thread);
            write_zeros<QTile, Traits::kBlockM, 128>(context.tiles.dout(stage), end, thread);
            fence_shared_for_async();
            __syncwarp();
            named_barrier_wait(kGroupBarrier + static_cast<int>(threadIdx.x / 128), 128);
        }
    }

private:
    template <class Tile, int kRows, int kThreads>
    __device__ static __forceinline__ void write_zeros(uint32_t tile, int first_row, int thread) {
        constexpr int kVectors = Tile::kChunks * 8;  // of 16 bytes in a row
#pragma unroll 1
        for (int i = first_row * kVectors + thread; i < kRows * kVectors; i += kThreads)
            store_zeros_16(tile + Tile::offset(i / kVectors, i % kVectors));
    }
};

}  // namespace libflash::cuda::sm90
