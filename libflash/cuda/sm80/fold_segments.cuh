// Writes the results of decode_invariant.cuh. Where several thread blocks share the segments of a row, a last kernel folds them
// from the last to the first, as the prefill kernel of sm90 does. The workspace has the accumulators of each segment and, in
// place of its LSE, its kept maximum and its row sum.
#pragma once

#include "cuda/attention/combine_splits.cuh"
#include "cuda/attention/invariant_softmax.cuh"

namespace libflash::cuda::sm80 {

template <class T>
struct FoldedRow {
    const DecodeParams& params;
    const int batch, row, head;
    const InvariantFold::Result result;

    __device__ __forceinline__ FoldedRow(const DecodeParams& p, int of_batch, int of_row, int of_head, const InvariantFold& fold)
        : params(p), batch(of_batch), row(of_row), head(of_head), result(fold.result(sink_of<T>(p, of_batch, of_head))) {}

    // One thread calls it.
    __device__ __forceinline__ void store_lse() const {
        const RowStatisticsParams& to = params.lse;
        if (to.data) to.data[batch * to.batch + row * to.row + head * to.head] = result.lse;
    }
    // Two channels from `channel` on; `o`: folded accumulators.
    __device__ __forceinline__ void store(int channel, float2 o) const {
        const float factor = result.factor;
        const float2 x = factor == 0.0f ? make_float2(0.0f, 0.0f) : make_float2(o.x * factor, o.y * factor);
        if (params.out_is_float) {
            store_pair<float>(params, batch, row, head, channel, x);
        } else {
            store_pair<T>(params, batch, row, head, channel, x);
        }
    }
};

// Each thread has two channels. Segments are loaded kAtOnce at a time, including those of which the row sees no key: their
// accumulators are undefined and are replaced by zeros.
template <class T, int kHeadDim>
struct FoldSegments {
    static constexpr int kThreads = kHeadDim / 2, kAtOnce = 16;

    __device__ __forceinline__ static void run(const DecodeParams& params, int64_t partial_row, int batch, int row, int head) {
        const int64_t first = partial_row * params.splits;
        const float2* const statistics = reinterpret_cast<const float2*>(params.partial_lse) + first;
        const float2* const sums = reinterpret_cast<const float2*>(params.partial_out) + first * kThreads + threadIdx.x;
        InvariantFold fold;
        float2 o = make_float2(0.0f, 0.0f);
#pragma unroll 1
        for (int end = params.splits; end > 0; end -= kAtOnce) {
            float2 of_segment[kAtOnce], loaded[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int segment = max(end - 1 - i, 0);
                of_segment[i] = statistics[segment];
                loaded[i] = sums[int64_t{segment} * kThreads];
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (i >= end) break;
                const InvariantFold::Factors factors = fold.add(of_segment[i].x, of_segment[i].y);
                const float2 x = of_segment[i].y == 0.0f ? make_float2(0.0f, 0.0f) : loaded[i];
                o = {factors.of(o.x, x.x), factors.of(o.y, x.y)};
            }
        }
        const FoldedRow<T> folded(params, batch, row, head, fold);
        if (threadIdx.x == 0) folded.store_lse();
        folded.store(static_cast<int>(threadIdx.x) * 2, o);
    }
};

template <class Kernel, class T>
__global__ void __launch_bounds__(FoldSegments<T, Kernel::config.head_dim_v>::kThreads)
    fold_segments_kernel(const __grid_constant__ DecodeParams params) {
    const CombinedRows rows = CombinedRows::of_block<kDecodeSlab>(params);
#pragma unroll 1
    for (int i = 0; i < rows.count; ++i)
        FoldSegments<T, Kernel::config.head_dim_v>::run(params, rows.partial_row + i * rows.stride, rows.batch, rows.first + i,
                                                        rows.head);
}

template <class Kernel, class T>
int launch_fold(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    if (plan.combine.blocks == 0) return cudaSuccess;
    return launch_dependent(fold_segments_kernel<Kernel, T>, plan.combine.blocks, plan.combine.threads, plan.combine.shared_bytes,
                            stream, plan.dependent_launch, params);
}

}  // namespace libflash::cuda::sm80
