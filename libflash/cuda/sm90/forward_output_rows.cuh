// Single rows of the output of the sm_90a forward kernel, written from registers.
#pragma once

#include "cuda/attention/head_maxima.cuh"
#include "cuda/attention/invariant_softmax.cuh"
#include "cuda/attention/row_statistics.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/forward_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardOutputRows {
    using T = typename Traits::T;
    using WorkTile = ForwardWorkTile<Traits>;

    const ForwardContext<Traits>& context;

    // Writes the LSE of a row of the work tile, with the sink if there is one. Returns the factor for the row's sum of P V: 0 if
    // the row sees no key or is beyond the used length (`is_used` is false).
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
        if constexpr (Traits::kCopied) factor *= work_tile.factors.values;
        // A row with NaN stays NaN: a NaN sum is not equal to 0, and its reciprocal is NaN.
        return sees_keys ? __fdividef(factor, sum) : 0.0f;
    }

    // Writes the statistics of row r of this thread (attention/row_statistics.cuh). All lanes of the warp call it. overflowed:
    // the row will be recomputed, its present values are not valid; of_warp: whether the warp writes its rows; write: whether
    // this lane writes.
    template <class Softmax>
    __device__ __forceinline__ void write_statistics(const WorkTile& work_tile, int local_row, bool is_used, bool overflowed,
                                                     const Softmax& softmax, int r, bool of_warp, bool write) const {
        const auto& params = context.params;
        const float kept = softmax.kept_maximum[r], row_sum = softmax.sum[r];
        const bool here = write && local_row < work_tile.owned_q(params) - work_tile.keys.first_row;
        if (params.max_logit.data || params.head_maxima) {
            float largest = row_sum == row_sum ? softmax.largest_score(r) * kLn2 + 0.0f : row_sum;  // never -0
            if (!is_used) largest = -INFINITY;
            write_number(params.max_logit, work_tile, local_row, largest, here);
            if (params.head_maxima) {
                const float of_rows = warp_largest(overflowed && !work_tile.exact_maximum ? -INFINITY : largest);
                if (of_warp && threadIdx.x % 32 == 0)
                    raise_to(params.head_maxima + work_tile.head() * params.head_maxima_stride, of_rows);
            }
        }
        if constexpr (Softmax::kEntropy) {
            if (!params.entropy.data) return;
            const float sink =
                params.sink.data ? head_number<T>(params.sink, work_tile.batch(), work_tile.head()) * kLog2e : -INFINITY;
            const float top = fmaxf(kept, sink), total = row_sum * exp2_approx(kept - top) + exp2_approx(sink - top);
            const float entropy = row_entropy(kept, row_sum, softmax.weighted[0][r], sink, total);
            write_number(params.entropy, work_tile, local_row, is_used ? entropy : 0.0f, here);
        }
    }
    // Writes the statistics of a row that sees no key.
    __device__ __forceinline__ void write_no_statistics(const WorkTile& work_tile, int local_row) const {
        write_number(context.params.max_logit, work_tile, local_row, -INFINITY, true);
        write_number(context.params.entropy, work_tile, local_row, 0.0f, true);
    }
    __device__ __forceinline__ void write_number(const RowStatisticsParams& to, const WorkTile& work_tile, int local_row, float x,
                                                 bool write) const {
        const int row = work_tile.start_q() + work_tile.keys.first_row + local_row;
        if (to.data && write) to.data[work_tile.batch() * to.batch + work_tile.head() * to.head + row * to.row] = x;
    }

    // As finish_row(), for the folded segments of an invariant row.
    __device__ __forceinline__ float finish_invariant_row(const WorkTile& work_tile, int local_row, bool is_used,
                                                          const InvariantFold& fold, bool write) const {
        const HeadParams& sink = context.params.sink;
        const InvariantFold::Result result =
            fold.result(sink.data ? head_number<T>(sink, work_tile.batch(), work_tile.head()) * kLog2e : -INFINITY);
        if (work_tile.lse && write && local_row < work_tile.owned_q(context.params) - work_tile.keys.first_row)
            work_tile.lse[local_row * context.params.lse.row] = is_used ? result.lse : -INFINITY;
        return is_used ? result.factor : 0.0f;
    }

    // The address of a row of out; nullptr if the row does not exist.
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
