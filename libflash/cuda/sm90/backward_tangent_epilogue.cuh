// The epilogue of a consumer warp of the sm_90a backward_tangent kernels: writes its 16 rows of tdq, tdk or tdv from registers.
// Shared memory may already hold the rows of the next work tile.
#pragma once

#include "cuda/sm90/backward_tangent_storage.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardTangentEpilogue {
    using T = typename Traits::T;
    static constexpr int kHeadDim = Traits::kHeadDim;

    // `first_row`: the lane's first row in its sequence. Rows beyond the used length become zeros.
    __device__ static __forceinline__ void store(const BackwardTangentWorkTile<Traits>& work, const RowsParams& to, int columns,
                                                 int first_row, int lane, const float (&sums)[kHeadDim / 2], float factor) {
        const int first_col = lane % 4 * 2;
        T* const matrix = static_cast<T*>(to.data) + work.at.batch * to.batch + work.at.head * to.head + first_col;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 8 * r;
            if (row >= work.rows.owned) continue;
            const bool used = row < work.rows.length;
            T* const at = matrix + int64_t{work.rows.start + row} * to.row;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                const float* pair = sums + 4 * n + 2 * r;
                if (n * 8 < columns)
                    *reinterpret_cast<uint32_t*>(at + n * 8) = used ? pack_pair(pair[0] * factor, pair[1] * factor, T()) : 0;
            }
        }
    }
};

}  // namespace libflash::cuda::sm90
