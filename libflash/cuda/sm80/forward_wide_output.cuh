// The end of forward with more than 256 channels: O goes through shared memory as floats, which the tiles of Q, K and V leave
// free, and one loop writes rows of any type and alignment. Code that writes them from registers would be unrolled for 128
// accumulators, once for each type, and would be most of the kernel. `Body`: Forward in forward.cuh with two warps per row.
#pragma once

#include "cuda/attention/element.cuh"
#include "cuda/sm80/forward_epilogue.cuh"

namespace libflash::cuda::sm80 {

template <class Body>
struct ForwardWideOutput {
    using T = typename Body::Element;
    static constexpr int kSlabs = Body::kSlabs, kChannelBlocks = Body::kChannelBlocks, kRows = Body::kTileRows;
    static_assert(kRows * Body::kChannels * 4 <= Body::kTileBytes, "O takes the place of the tiles");

    Body& body;

    // Normalizes O, writes the LSE and O. No warp reads a tile any more.
    __device__ __forceinline__ void store() {
        float factor[kSlabs][2];
        ForwardEpilogue<Body> epilogue{body};
        epilogue.normalize([&](int a, int r, float inverse) { factor[a][r] = inverse; });
        float (&weights)[kRows] = Body::Pair::words().largest[0];  // of the earlier result
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = body.warp_row() + a * 16 + r * 8 + body.lane / 4;
                if (body.part() == 0 && body.lane % 4 == 0) weights[row] = epilogue.earlier[a][r];
                epilogue.scale_out(a, r, factor[a][r]);
#pragma unroll
                for (int n = 0; n < kChannelBlocks; ++n)
                    *reinterpret_cast<float2*>(chunk(row, body.part() * kChannelBlocks + n) + body.lane % 4 * 2) =
                        make_float2(body.o[a][n][2 * r], body.o[a][n][2 * r + 1]);
            }
        __syncthreads();
        if (body.params.wide_out) {
            store_rows<float>(weights);
        } else {
            store_rows<T>(weights);
        }
    }

    // Eight channels of a row. The chunks of four neighbouring rows change places, so that 16 lanes write to different banks.
    __device__ __forceinline__ float* chunk(int row, int number) const {
        return reinterpret_cast<float*>(body.shared) + row * Body::kChannels + (number ^ (row & 3)) * 8;
    }

    template <class Out>
    __device__ __forceinline__ void store_rows(const float (&weights)[kRows]) {
        constexpr int kChunks = Body::kChannels / 8;
        const auto work = body.common().work;
        const auto q_rows = body.common().q_rows;
        Out* const out = Body::template start<Out>(body.params.out, work.batch, q_rows.start, work.head);
        const int rows = min(kRows, q_rows.owned - work.tile * kRows);
#pragma unroll 1
        for (int i = body.thread; i < rows * kChunks; i += Body::kThreads) {
            const int row = i / kChunks, number = i % kChunks;
            store_chunk(out + (work.tile * kRows + row) * body.params.out.row + number * 8, body.params.head_dim_v - number * 8,
                        weights[row], chunk(row, number));
        }
    }

    // x + weight * old; with a weight of 0, x, whatever was there. Of eight channels, `cols` exist.
    template <class Out>
    __device__ __forceinline__ void store_chunk(Out* to, int cols, float weight, const float* from) const {
        constexpr int kAtOnce = 16 / sizeof(Out);
        float x[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            x[c] = from[c];
            if (weight != 0.0f && c < cols) x[c] = fmaf(weight, to_float(to[c]), x[c]);
        }
#pragma unroll
        for (int first = 0; first < 8; first += kAtOnce) {
            if (first >= cols) return;
            if (body.params.vector_out) {
                alignas(16) Out vector[kAtOnce];
#pragma unroll
                for (int c = 0; c < kAtOnce; ++c) vector[c] = from_float(x[first + c], Out());
                *reinterpret_cast<uint4*>(to + first) = *reinterpret_cast<const uint4*>(vector);
            } else {
#pragma unroll
                for (int c = first; c < first + kAtOnce; ++c)
                    if (c < cols) to[c] = from_float(x[c], Out());
            }
        }
    }
};

}  // namespace libflash::cuda::sm80
