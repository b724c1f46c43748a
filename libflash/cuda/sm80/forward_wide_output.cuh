// The epilogue of forward with more than 256 channels: O is staged as floats in shared memory, in the place of the tiles of Q, K
// and V, which are no longer needed. `Body`: Forward in forward.cuh with two warps per row.
#pragma once

#include "cuda/sm80/forward_epilogue.cuh"
#include "cuda/tile/float_rows.cuh"

namespace libflash::cuda::sm80 {

template <class Body>
struct ForwardWideOutput {
    using T = typename Body::Element;
    static constexpr int kSlabs = Body::kSlabs, kChannelBlocks = Body::kChannelBlocks, kRows = Body::kTileRows;
    using Rows = FloatRows<kRows, Body::kChannels, Body::kThreads>;
    static_assert(Rows::kBytes <= Body::kTileBytes, "O takes the place of the tiles");

    Body& body;

    // Normalizes O, writes the LSE and O. No warp may read the tiles of Q, K and V any more.
    __device__ __forceinline__ void store() {
        float factor[kSlabs][2];
        ForwardEpilogue<Body> epilogue{body};
        epilogue.normalize([&](int a, int r, float inverse) { factor[a][r] = inverse; });
        const Rows rows{body.shared};
        auto& weights = Body::Pair::row_numbers();  // continuation: the weight of the earlier result in each row
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = body.warp_row() + a * 16 + r * 8 + body.lane / 4;
                if (body.part() == 0 && body.lane % 4 == 0) weights[row] = epilogue.earlier[a][r];
                epilogue.scale_out(a, r, factor[a][r]);
#pragma unroll
                for (int n = 0; n < kChannelBlocks; ++n)
                    *reinterpret_cast<float2*>(rows.chunk(row, body.part() * kChannelBlocks + n) + body.lane % 4 * 2) =
                        make_float2(body.o[a][n][2 * r], body.o[a][n][2 * r + 1]);
            }
        __syncthreads();
        if (Body::kFloat || body.params.wide_out) {
            store_rows<float>(rows, weights);
        } else {
            store_rows<T>(rows, weights);
        }
    }

    template <class Out>
    __device__ __forceinline__ void store_rows(const Rows& rows, const float (&weights)[kRows]) {
        const auto work = body.common().work;
        const auto q_rows = body.common().q_rows;
        const RowsParams& out = body.params.out;
        const int first = work.tile * kRows;
        rows.store(
            Body::template start<Out>(out, work.batch, q_rows.start, work.head) + first * out.row, out.row,
            min(kRows, q_rows.owned - first), body.params.head_dim_v, body.params.vector_out,
            [&](int row) { return weights[row]; }, body.thread);
    }
};

}  // namespace libflash::cuda::sm80
