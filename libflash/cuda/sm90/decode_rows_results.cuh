// The epilogue of the sm_90a decode kernel for many rows: stores the result of the split or, without splits, of the rows
// (decode_output_row.cuh).
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/sm90/decode_output_row.cuh"
#include "cuda/sm90/decode_rows_storage.cuh"
#include "cuda/sm90/decode_softmax.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

// The two rows of a consumer thread.
template <class Traits>
struct DecodeRowsResults {
    using T = typename Traits::T;
    static constexpr int kBlocks = Traits::kHeadDimV / 8;  // of 8 channels
    using Sums = float[4 * kBlocks];

    const DecodeRowsContext<Traits>& context;
    int lane, first_row;

    __device__ __forceinline__ void finish(const DecodeSoftmax<Traits>& softmax, const Sums& o) const {
        const DecodeParams& params = context.params;
        const RaggedWorkTile& rows = context.storage.work_tile.rows;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 8 * r;
            const float sum = quad_sum(softmax.sum[r]), lse = sum != 0.0f ? softmax.kept_maximum[r] + __log2f(sum) : -INFINITY;
            const float inverse = sum != 0.0f ? 1.0f / sum : 0.0f;  // 0: the row sees no key
            const bool exists = row < rows.rows, writes = exists && lane % 4 == 0;
            if (params.splits > 1) {
                const int64_t range = partial_row_of(params, rows, row) * params.splits + rows.split;
                if (writes) params.partial_lse[range] = lse;
                if (exists) store_floats(params.partial_out + range * Traits::kHeadDimV, o, r, inverse);
            } else {
                const DecodeOutputRow out(params, rows, exists ? row : 0);
                const float of_sink = out.template finish<T>(params, lse, writes);
                store_rounded(exists ? out.template address<T>(params) : nullptr, o, r, inverse, of_sink);
            }
        }
    }

private:
    __device__ __forceinline__ void store_floats(float* to, const Sums& o, int r, float factor) const {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
            *reinterpret_cast<float2*>(to + n * 8 + lane % 4 * 2) =
                make_float2(o[4 * n + 2 * r] * factor, o[4 * n + 2 * r + 1] * factor);
    }
    // Stores sixteen bytes at a time: the four lanes of a row exchange their pairs. `to`: nullptr if the row does not exist.
    // The two factors are applied one after the other, as with splits, so that the bits are the same.
    __device__ __forceinline__ void store_rounded(T* to, const Sums& o, int r, float inverse, float of_sink) const {
#pragma unroll
        for (int n = 0; n < kBlocks; n += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const pair = o + 4 * (n + i) + 2 * r;
                words[i] = pack_pair(pair[0] * inverse * of_sink, pair[1] * inverse * of_sink, T());
            }
            transpose_quad(words, lane);
            const int channel = (n + lane % 4) * 8;
            if (to && channel < context.params.head_dim_v)
                *reinterpret_cast<uint4*>(to + channel) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

}  // namespace libflash::cuda::sm90
