// The epilogue of a consumer warp of the sm_90a backward kernel: writes its 16 rows of dK or dV, through its rows of a tile in
// shared memory that nobody reads any more.
#pragma once

#include "cuda/attention/gradient_sums.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/backward_context.cuh"
#include "cuda/sm90/tma_row_store.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardEpilogue {
    using T = typename Traits::T;
    using KvTile = typename Traits::KvTile;
    static constexpr int kRows = 16, kHeadDim = Traits::kHeadDim, kSums = kHeadDim / 2;
    using RowStore = TmaRowStore<KvTile, kHeadDim>;
    using Sums = float[kSums];

    const BackwardContext<Traits>& context;

    static constexpr int kTileOfV = KvTile::kBytes;  // offset of V in shared memory
    // `first_key`: of the warp, in the tile. `tile`: offset of the tile in shared memory.
    __device__ __forceinline__ void store_dk(int first_key, int lane, Sums& dk, float factor, int tile = kTileOfV) const {
        if (add_parts(dk, 1))
            store(first_key, lane, dk, factor, tile, context.maps.dk, context.params.dk, context.params.head_dim);
    }
    __device__ __forceinline__ void store_dv(int first_key, int lane, Sums& dv, float factor, int tile = kTileOfV) const {
        if (add_parts(dv, 0))
            store(first_key, lane, dv, factor, tile, context.maps.dv, context.params.dv, context.params.head_dim_v);
    }

private:
    // False: this launch is not the last one of the key tile (attention/gradient_sums.cuh).
    __device__ __forceinline__ bool add_parts(Sums& sums, int gradient) const {
        constexpr int kThreads = Traits::kBlockN * 2;  // that have sums of one gradient
        static_assert(256 % kThreads == 0, "the consumers begin with thread 256");
        const int thread = hide_from_compiler(static_cast<int>(threadIdx.x)) % kThreads;
        const GradientSums<kThreads, kSums / 4> parts(context.params.part, context.storage.number, gradient, thread);
        return parts.add_parts([&](int n) -> float* { return sums + 4 * n; });
    }

    __device__ __forceinline__ void store(int first_key, int lane, const Sums& sums, float factor, int tile,
                                          const CUtensorMap& map, const RowsParams& rows, int columns) const {
        RowStore::wait_for_rows(lane);
        if constexpr (Traits::kRagged) {
            write_used_rows(first_key, lane, sums, factor, tile);
            const int count = context.storage.k_rows.owned - context.storage.tiles.first_col - first_key;
            if (count < kRows) return copy_rows(first_key, lane, count, tile, rows, columns);
        } else {
            RowStore::write_rows(context.tiles.k() + tile, first_key, lane, sums,
                                 [&](const float* pair, int) { return pack_pair(pair[0] * factor, pair[1] * factor, T()); });
        }
        if (lane != 0) return;
        const auto& storage = context.storage;
        RowStore::store_chunks(context.tiles.k() + tile + first_key * 128, [&](uint32_t chunk, int col) {
            tma_store(chunk, map, col, storage.key_row() + first_key, storage.work.head, storage.work.batch);
        });
    }

    // Rounds the rows to shared memory; rows beyond the used length become zeros, whatever the sums are.
    __device__ __forceinline__ void write_used_rows(int first_key, int lane, const Sums& sums, float factor, int tile) const {
        const int used = context.storage.tiles.length_k - context.storage.tiles.first_col - first_key - lane / 4;
        RowStore::write_rows(context.tiles.k() + tile, first_key, lane, sums, [&](const float* pair, int i) {
            return i % 2 * 8 < used ? pack_pair(pair[0] * factor, pair[1] * factor, T()) : 0;
        });
    }
    // Copies the first `count` rows from shared memory: a TMA store of all rows would reach into another sequence.
    __device__ __forceinline__ void copy_rows(int first_key, int lane, int count, int tile, const RowsParams& rows,
                                              int columns) const {
        const auto& storage = context.storage;
        T* const first = static_cast<T*>(rows.data) + storage.work.batch * rows.batch + storage.work.head * rows.head +
                         int64_t{storage.key_row() + first_key} * rows.row;
        const int vectors = columns / 8;  // of 16 bytes in a row
#pragma unroll 1
        for (int i = lane; i < count * vectors; i += 32) {
            const int row = i / vectors, vector = i % vectors;
            *reinterpret_cast<uint4*>(first + row * rows.row + vector * 8) =
                *reinterpret_cast<const uint4*>(context.tiles.memory + tile + KvTile::offset(first_key + row, vector));
        }
    }
};

}  // namespace libflash::cuda::sm90
