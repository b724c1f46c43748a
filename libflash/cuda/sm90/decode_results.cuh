// The epilogue of the sm_90a decode kernel: stores the result of the split or, without splits, of the rows
// (attention/combine_splits.cuh).
#pragma once

#include "cuda/sm90/decode_output_row.cuh"
#include "cuda/sm90/decode_shared_storage.cuh"
#include "cuda/sm90/decode_softmax.cuh"

namespace libflash::cuda::sm90 {

// The two rows of a consumer thread.
template <class Traits>
struct DecodeResults {
    using T = typename Traits::T;
    static constexpr int kPieces = Traits::kPieces, kBlocks = Traits::kPiece / 8;  // of 8 channels
    using Sums = float[kPieces][4 * kBlocks];

    const DecodeContext<Traits>& context;
    int group, warp, lane;  // warp: of the warpgroup

    __device__ __forceinline__ void finish(DecodeSoftmax<Traits>& softmax, const Sums& o) const {
        context.storage.exchanges.join(softmax.sum, group, row(0), lane);
        const DecodeParams& params = context.params;
        const RaggedWorkTile& rows = context.storage.work_tile.rows;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = softmax.sum[r], lse = sum != 0.0f ? softmax.kept_maximum[r] + __log2f(sum) : -INFINITY;
            const float inverse = sum != 0.0f ? 1.0f / sum : 0.0f;  // 0: the row sees no key
            const bool exists = row(r) < rows.rows, writes = exists && group == 0 && lane % 4 == 0;
            if (params.splits > 1) {
                const int64_t range = partial_row_of(params, rows, row(r)) * params.splits + rows.split;
                if (writes) params.partial_lse[range] = lse;
                if (exists) store_floats(params.partial_out + range * Traits::kHeadDimV, o, r, inverse);
            } else {
                const DecodeOutputRow out(params, rows, exists ? row(r) : 0);
                const float of_sink = out.template finish<T>(params, lse, writes);
                store_rounded(exists ? out.template address<T>(params) : nullptr, o, r, inverse, of_sink);
            }
        }
    }

private:
    __device__ __forceinline__ int row(int r) const { return 16 * warp + lane / 4 + 8 * r; }

    __device__ __forceinline__ void store_floats(float* to, const Sums& o, int r, float factor) const {
        to += group * Traits::kHalf + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kPieces * kBlocks; ++n) {
            const float* const pair = o[n / kBlocks] + n % kBlocks * 4 + 2 * r;
            *reinterpret_cast<float2*>(to + n * 8) = make_float2(pair[0] * factor, pair[1] * factor);
        }
    }
    // Stores sixteen bytes at a time: the four lanes of a row exchange their pairs. `to`: nullptr if the row does not exist.
    // The two factors are applied one after the other, as with splits, so that the bits are the same.
    __device__ __forceinline__ void store_rounded(T* to, const Sums& o, int r, float inverse, float of_sink) const {
#pragma unroll
        for (int n = 0; n < kPieces * kBlocks; n += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const pair = o[n / kBlocks] + (n % kBlocks + i) * 4 + 2 * r;
                words[i] = pack_pair(pair[0] * inverse * of_sink, pair[1] * inverse * of_sink, T());
            }
            transpose_quad(words, lane);
            if (to)
                *reinterpret_cast<uint4*>(to + group * Traits::kHalf + (n + lane % 4) * 8) =
                    make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

}  // namespace libflash::cuda::sm90
