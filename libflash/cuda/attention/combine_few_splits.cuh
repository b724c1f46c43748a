// Combine for rows with few splits: each warp computes a row, with the same bits as combine_splits.cuh.
#pragma once

#include "cuda/attention/combine_splits.cuh"

namespace libflash::cuda {

// One row of at most kSplits splits, as many as one warp of CombineSplits adds up.
template <class T, int kHeadDim, class Out>
struct CombineFewSplits {
    using Row = CombineSplits<T, kHeadDim, Out>;
    static constexpr int kWarps = Row::kWarps, kThreads = Row::kThreads, kPairs = Row::kPairs, kSplits = Row::kShare;

    Row row;
    float2 loaded[kSplits][kPairs];
    float lse;  // of split number `lane`

    // Loads the partial results. The row may belong to no sequence.
    __device__ __forceinline__ CombineFewSplits(const DecodeParams& params, int64_t partial_row) : row(params, partial_row) {
        lse = row.lse_of(row.lane);
#pragma unroll
        for (int i = 0; i < kSplits; ++i)
#pragma unroll
            for (int c = 0; c < kPairs; ++c) {
                const float* const from = row.out + i * kHeadDim + channel(c);
                loaded[i][c] = i < params.splits ? *reinterpret_cast<const float2*>(from) : float2{};
            }
    }
    // Adds in the order of CombineSplits::run(), the sums of its warps and then these, and stores.
    __device__ __forceinline__ void finish(int batch, int out_row, int head) {
        const DecodeParams& params = row.params;
        const float all = row.lse_of_all(lse);
        const float weight = finish_row(params, batch, out_row, head, all, sink_of<T>(params, batch, head), row.lane == 0);
        const float factor = Row::factor_of(lse, all, weight);
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            float2 part[kPairs] = {};
#pragma unroll
            for (int i = warp; i < kSplits; i += kWarps) Row::add(part, loaded[i], __shfl_sync(0xffffffffu, factor, i));
#pragma unroll
            for (int c = 0; c < kPairs; ++c) row.sums[c].x += part[c].x, row.sums[c].y += part[c].y;
        }
#pragma unroll
        for (int c = 0; c < kPairs; ++c) row.store(batch, out_row, head, channel(c), row.sums[c]);
    }

private:
    __device__ __forceinline__ int channel(int pair) const { return pair * 64 + row.lane * 2; }
};

template <class Kernel, class T, class Out>
__global__ void __launch_bounds__(CombineFewSplits<T, Kernel::config.head_dim_v, Out>::kThreads)
    combine_few_splits_kernel(const __grid_constant__ DecodeParams params) {
    using Row = CombineFewSplits<T, Kernel::config.head_dim_v, Out>;
    const int warp = threadIdx.x / 32;
    const bool all_of_sequence = params.ragged.most_rows > 0;
    CombinedRows rows = CombinedRows::one(params, blockIdx.x * Row::kWarps + warp);
    allow_next_kernel();
    wait_for_previous_kernel();
    if (all_of_sequence) rows = CombinedRows::sequence<Kernel::config.tile_k>(params);
#pragma unroll 1
    for (int i = all_of_sequence ? warp : 0; i < rows.count; i += Row::kWarps) {
        Row row(params, rows.partial_row + i * rows.stride);
        if (all_of_sequence || rows.is_of_sequence(params)) row.finish(rows.batch, rows.first + i, rows.head);
    }
}

}  // namespace libflash::cuda
