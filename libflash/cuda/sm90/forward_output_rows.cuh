// Single rows of the output of the sm_90a forward kernel, written from registers.
#pragma once

#include "cuda/attention/invariant_softmax.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/forward_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardOutputRows {
    using T = typename Traits::T;
    using WorkTile = ForwardWorkTile<Traits>;

    const ForwardContext<Traits>& context;

    // Writes the LSE of a row of the work tile, with the sink if there is one. Returns the factor for the row's sum of P V; 0 if
    // the row sees no key, or if it is not used (`is_used` is false), because it is beyond the used length.
    __device__ __forceinline__ float finish_row(const WorkTile& work_tile, int local_row, bool is_used, float maximum, float sum,
                                                bool write) const {
        if constexpr (Traits::kInvariant) return finish_invariant_row(work_tile, local_row, is_used, {maximum, sum}, write);
        float largest = maximum, factor = 1.0f;
        if (context.params.sink.data) {
            const float sink = head_number<T>(context.params.sink, work_tile.batch(), work_tile.head()) * kLog2e;
            largest = fmaxf(maximum, sink);
            factor = exp2_approx(maximum - largest);
            sum = sum * factor + exp2_approx(sink - largest);
        }
        const bool sees_keys = is_used && sum != 0.0f;
        if (work_tile.lse && write && local_row < work_tile.owned_q(context.params) - work_tile.keys.first_row)
            work_tile.lse[local_row * context.params.lse.row] = sees_keys ? (largest + __log2f(sum)) * kLn2 : -INFINITY;
        if constexpr (Traits::kRareOptions) factor *= context.params.rare.dropout.keep_factor;
        // A row with NaN stays NaN: a NaN sum is not equal to 0, and its reciprocal is NaN.
        return sees_keys ? __fdividef(factor, sum) : 0.0f;
    }

    // The same for the folded segments of an invariant row.
    __device__ __forceinline__ float finish_invariant_row(const WorkTile& work_tile, int local_row, bool is_used,
                                                          const InvariantFold& fold, bool write) const {
        const HeadParams& sink = context.params.sink;
        const InvariantFold::Result result =
            fold.result(sink.data ? head_number<T>(sink, work_tile.batch(), work_tile.head()) * kLog2e : -INFINITY);
        if (work_tile.lse && write && local_row < work_tile.owned_q(context.params) - work_tile.keys.first_row)
            work_tile.lse[local_row * context.params.lse.row] = is_used ? result.lse : -INFINITY;
        return is_used ? result.factor : 0.0f;
    }

    // nullptr if the row does not exist.
    __device__ __forceinline__ T* address(const WorkTile& work_tile, int row) const {
        if (row >= work_tile.owned_q(context.params)) return nullptr;
        return static_cast<T*>(context.params.out.data) + work_tile.batch() * context.params.out.batch +
               work_tile.head() * context.params.out.head + (work_tile.start_q() + row) * context.params.out.row;
    }

    // Writes eight channels, from `col` on.
    __device__ __forceinline__ void write_eight(T* row, int col, const uint4& eight) const {
        if (row && col < context.params.head_dim_v) *reinterpret_cast<uint4*>(row + col) = eight;
    }
};

}  // namespace libflash::cuda::sm90
