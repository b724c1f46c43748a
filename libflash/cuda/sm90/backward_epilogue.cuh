// The epilogue of a consumer warp of the sm_90a backward kernel: writes its 16 rows of dK or dV, through its rows of a tile in
// shared memory that is no longer read.
#pragma once

#include "cuda/attention/gradient_sums.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/backward_context.cuh"
#include "cuda/sm90/backward_split_sums.cuh"
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

    // The rows of a warp: the work tile, the first row in it, and the offset of the tile in shared memory through which they are
    // written.
    struct Rows {
        const BackwardWorkTile<Traits>& of;
        int first_key, tile;
    };
    // The rows of the current work tile, written through V.
    __device__ __forceinline__ Rows rows_through_v(int first_key) const {
        return {context.tile(), first_key, context.key_stage() * BackwardSharedTiles<Traits>::kKeyStageBytes + KvTile::kBytes};
    }
    // The same, written through the stages of dS, which must be empty. K and V of the next work tile can be loaded meanwhile. A
    // warp writes only to the memory of its own rows of dS, because other warps may already store dS of the next work tile.
    __device__ __forceinline__ Rows rows_through_scores(int first_key) const {
        using ScoreTile = typename Traits::ScoreTile;
        static_assert(Traits::kScoreStages * ScoreTile::kBytes >= KvTile::kBytes, "dS has enough memory");
        static_assert(KvTile::kChunkBytes == ScoreTile::kChunkBytes, "a row has the same place in both");
        return {context.tile(), first_key, BackwardSharedTiles<Traits>::kScoresAt};
    }

    __device__ __forceinline__ void store_dk(const Rows& rows, int lane, Sums& dk, float factor) const {
        if (add_parts(rows.of, dk, 1)) store(rows, lane, dk, factor, context.maps.dk, context.params.dk, context.params.head_dim);
    }
    __device__ __forceinline__ void store_dv(const Rows& rows, int lane, Sums& dv, float factor) const {
        if (add_parts(rows.of, dv, 0))
            store(rows, lane, dv, factor, context.maps.dv, context.params.dv, context.params.head_dim_v);
    }
    // The warp calls it after the last store and before other warps write to the tile.
    __device__ static __forceinline__ void wait(int lane) { RowStore::wait_for_rows(lane); }

private:
    // Returns false if this launch is not the last one of the key tile (attention/gradient_sums.cuh), or if other splits of the
    // key tile have not ended yet.
    __device__ __forceinline__ bool add_parts(const BackwardWorkTile<Traits>& of, Sums& sums, int gradient) const {
        constexpr int kThreads = Traits::kBlockN * 2;  // that hold sums of one gradient
        static_assert(256 % kThreads == 0, "the consumers begin with thread 256");
        const int thread = hide_from_compiler(static_cast<int>(threadIdx.x)) % kThreads;
        const auto vector = [&](int n) -> float* { return sums + 4 * n; };
        if constexpr (Traits::kSplits) {
            const SplitTilesParams& split_tiles = context.params.split_tiles;
            if (of.number >= split_tiles.first)
                return BackwardSplitSums<kThreads, kSums / 4>{split_tiles, of.number - split_tiles.first, gradient, thread}.add(
                    vector);
        }
        return GradientSums<kThreads, kSums / 4>(context.params.part, of.number, gradient, thread).add_parts(vector);
    }

    __device__ __forceinline__ void store(const Rows& rows, int lane, const Sums& sums, float factor, const CUtensorMap& map,
                                          const RowsParams& gradient, int columns) const {
        const uint32_t tile = context.tiles.address() + rows.tile;
        RowStore::wait_for_rows(lane);
        if constexpr (Traits::kRagged) {
            write_used_rows(rows, lane, sums, factor, tile);
            const int count = rows.of.k_rows.owned - rows.of.tiles.first_col - rows.first_key;
            if (count < kRows) return copy_rows(rows, lane, count, gradient, columns);
        } else {
            RowStore::write_rows(tile, rows.first_key, lane, sums,
                                 [&](const float* pair, int) { return pack_pair(pair[0] * factor, pair[1] * factor, T()); });
        }
        if (lane != 0) return;
        RowStore::store_chunks(tile + rows.first_key * 128, [&](uint32_t chunk, int col) {
            tma_store(chunk, map, col, rows.of.key_row() + rows.first_key, rows.of.work.head, rows.of.work.batch);
        });
    }

    // Writes the rounded rows to shared memory; rows beyond the used length become zeros, even if their sums are NaN.
    __device__ __forceinline__ void write_used_rows(const Rows& rows, int lane, const Sums& sums, float factor,
                                                    uint32_t tile) const {
        const int used = rows.of.tiles.length_k - rows.of.tiles.first_col - rows.first_key - lane / 4;
        RowStore::write_rows(tile, rows.first_key, lane, sums, [&](const float* pair, int i) {
            // Hidden from the compiler, which would put the multiplications under the condition and load the factor for each.
            const int packed = hide_from_compiler(static_cast<int>(pack_pair(pair[0] * factor, pair[1] * factor, T())));
            return i % 2 * 8 < used ? static_cast<uint32_t>(packed) : 0;
        });
    }
    // Copies only the first `count` rows from shared memory, because a TMA store of all rows would write into the next sequence.
    __device__ __forceinline__ void copy_rows(const Rows& rows, int lane, int count, const RowsParams& gradient,
                                              int columns) const {
        T* const first = static_cast<T*>(gradient.data) + rows.of.work.batch * gradient.batch +
                         rows.of.work.head * gradient.head + int64_t{rows.of.key_row() + rows.first_key} * gradient.row;
        const int vectors = columns / 8;  // of 16 bytes in a row
#pragma unroll 1
        for (int i = lane; i < count * vectors; i += 32) {
            const int row = i / vectors, vector = i % vectors;
            *reinterpret_cast<uint4*>(first + row * gradient.row + vector * 8) =
                *reinterpret_cast<const uint4*>(context.tiles.memory + rows.tile + KvTile::offset(rows.first_key + row, vector));
        }
    }
};

}  // namespace libflash::cuda::sm90
