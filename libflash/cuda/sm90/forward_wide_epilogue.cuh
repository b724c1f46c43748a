// The epilogue of a work tile of the sm_90a forward kernel for wide heads: adds the row sums of both warpgroups, and writes LSE
// and O from registers.
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/sm90/forward_wide_softmax.cuh"
#include "cuda/sm90/forward_wide_storage.cuh"

namespace libflash::cuda::sm90 {

// The two rows of a consumer thread.
template <class Traits>
struct ForwardWideEpilogue {
    using T = typename Traits::T;
    static constexpr int kPieces = Traits::kPieces, kBlocks = Traits::kPiece / 8;  // of 8 channels
    using Sums = float[kPieces][4 * kBlocks];

    const ForwardWideContext<Traits>& context;
    int group, warp, lane;  // warp: of the warpgroup

    __device__ __forceinline__ void finish(ForwardWideSoftmax<Traits>& softmax, const Sums& o) const {
        context.storage.exchanges.join(softmax.sum, group, local_row(0), lane);
#pragma unroll
        for (int r = 0; r < 2; ++r) write_row(o, r, finish_row(row(r), softmax.kept_maximum[r], softmax.sum[r]));
    }

private:
    __device__ __forceinline__ const ForwardWideWorkTile<Traits>& work_tile() const { return context.storage.work_tile; }
    __device__ __forceinline__ int local_row(int r) const { return 16 * warp + lane / 4 + 8 * r; }
    // Row r in its sequence.
    __device__ __forceinline__ int row(int r) const { return work_tile().keys.first_row + local_row(r); }

    // Writes the LSE, with the sink if there is one. Returns the factor for the row's sum of P V; 0 if the row sees no key, or is
    // beyond the used length.
    __device__ __forceinline__ float finish_row(int row, float maximum, float sum) const {
        const ForwardParams& params = context.params;
        const TileCoordinates& at = work_tile().at;
        float largest = maximum, factor = 1.0f;
        if (params.sink.data) {
            const float sink = head_number<T>(params.sink, at.batch, at.head) * kLog2e;
            largest = fmaxf(maximum, sink);
            factor = exp2_approx(maximum - largest);
            sum = sum * factor + exp2_approx(sink - largest);
        }
        const bool sees_keys = row < work_tile().q_rows.length && sum != 0.0f;
        if (params.lse.data && group == 0 && lane % 4 == 0 && row < work_tile().q_rows.owned)
            params.lse.data[at.batch * params.lse.batch + at.head * params.lse.head +
                            (work_tile().q_rows.start + row) * params.lse.row] =
                sees_keys ? (largest + __log2f(sum)) * kLn2 : -INFINITY;
        // A row with NaN stays NaN: a NaN sum is not equal to 0, and its reciprocal is NaN.
        return sees_keys ? __fdividef(factor, sum) : 0.0f;
    }

    // Writes sixteen bytes at a time: the four lanes of a row exchange their pairs. If factor is 0 it writes zeros, even if the
    // sums are NaN.
    __device__ __forceinline__ void write_row(const Sums& o, int r, float factor) const {
        const ForwardParams& params = context.params;
        const TileCoordinates& at = work_tile().at;
        const bool exists = row(r) < work_tile().q_rows.owned;
        T* const out = static_cast<T*>(params.out.data) + at.batch * params.out.batch + at.head * params.out.head +
                       (work_tile().q_rows.start + row(r)) * params.out.row;
#pragma unroll
        for (int n = 0; n < kPieces * kBlocks; n += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const pair = o[n / kBlocks] + (n % kBlocks + i) * 4 + 2 * r;
                words[i] = factor == 0.0f ? 0 : pack_pair(pair[0] * factor, pair[1] * factor, T());
            }
            transpose_quad(words, lane);
            const int col = group * Traits::kHalf + (n + lane % 4) * 8;
            if (exists && col < params.head_dim_v)
                *reinterpret_cast<uint4*>(out + col) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

}  // namespace libflash::cuda::sm90
