// The epilogue of a consumer warp of the sm_90a backward_tangent kernels: writes its 16 rows of tdq, tdk or tdv, through its rows
// of a tile in shared memory that nobody reads any more.
#pragma once

#include "cuda/sm90/backward_tangent_storage.cuh"
#include "cuda/sm90/tma_row_store.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardTangentEpilogue {
    using T = typename Traits::T;
    using RowTile = typename Traits::RowTile;
    static constexpr int kRows = 16, kHeadDim = Traits::kHeadDim;

    const BackwardTangentContext<Traits>& context;

    // `warp`: of the warpgroup. `tile`: shared address.
    __device__ __forceinline__ void store(const RowsParams& to, int columns, int group, int warp, int lane,
                                          const float (&sums)[kHeadDim / 2], float factor, uint32_t tile) const {
        const auto& work = context.storage.work_tile;
        const int first_row = work.first_row() + group * Traits::kGroupRows + warp * kRows;
        const int used = work.rows.length - first_row - lane / 4;  // rows beyond the used length become zeros
        TmaRowStore<RowTile, kHeadDim>::write_rows(tile, warp * kRows, lane, sums, [&](const float* pair, int i) {
            return i % 2 * 8 < used ? pack_pair(pair[0] * factor, pair[1] * factor, T()) : 0;
        });
        T* const first = static_cast<T*>(to.data) + work.at.batch * to.batch + work.at.head * to.head +
                         int64_t{work.rows.start + first_row} * to.row;
        const int count = min(work.rows.owned - first_row, kRows), vectors = columns / 8;  // of 16 bytes in a row
#pragma unroll 1
        for (int i = lane; i < count * vectors; i += 32) {
            const int row = i / vectors, vector = i % vectors;
            *reinterpret_cast<float4*>(first + row * to.row + vector * 8) =
                load_shared_16(tile + RowTile::offset(warp * kRows + row, vector));
        }
    }
};

}  // namespace libflash::cuda::sm90
