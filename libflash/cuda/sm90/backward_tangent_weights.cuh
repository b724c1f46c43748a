// The weights of a tile in a consumer thread of the sm_90a backward_tangent kernels, in the layout of wgmma. Rows are the rows of
// the kernel (backward_tangent_traits.cuh). With x = dP - delta, y = tdP - tdelta and below = ts - mu:
//
//   P = exp(S - LSE)    tP = P below    dS = P x    tdS = P (below x + y)
#pragma once

#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/backward_tangent_storage.cuh"
#include "cuda/tile/accumulator.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardTangentWeights {
    using T = typename Traits::T;
    static constexpr bool kKeys = Traits::kKeys;
    static constexpr int kBlockN = Traits::kBlockN, kCount = kBlockN / 2;
    using Numbers = float[kCount];
    using Fragment = uint32_t[4];
    using Tiles = typename BackwardTangentWorkTile<Traits>::Tiles;
    // The statistics of the lane's rows, if these are queries.
    struct RowStatistics {
        TangentStatistics of[2];
    };

    const BackwardTangentContext<Traits>& context;

    // S becomes P, times 2^exponent_shift(), which the LSE contains; tS becomes below.
    __device__ __forceinline__ void exponentiate(Numbers& s, Numbers& ts, const RowStatistics& rows, uint32_t cols) const {
        const float scale_log2 = context.params.scale_log2, scale = context.params.softmax_scale;
        for_pairs(rows, cols, [&](int i, const TangentStatistics& of) {
            s[i] = exp2_approx(fmaf(s[i], scale_log2, -of.lse_log2));
            ts[i] = fmaf(ts[i], scale, -of.mu);
        });
    }
    // Applies the causal mask, the window and the lengths to P: a hidden P becomes 0 even if its score is NaN. `row`: the lane's
    // first row.
    __device__ __forceinline__ void mask_edge(Numbers& p, const Tiles& tiles, int row, int lane, int tile) const {
        const int first_col = tile * kBlockN + (hide_from_compiler(lane) & 3) * 2;
        if constexpr (kKeys) {
            mask_edge_transposed(tiles, first_col, row, 0.0f, p);
        } else {
            for_accumulator_rows(p, [&](int, int r, const auto& for_columns) {
                const VisibleRange keys = keys_seen_by(tiles, row + r * 8, first_col);
                for_columns([&](float& probability, int col) {
                    const bool hides = col < keys.begin || col >= keys.end;
                    if (hides) probability = 0.0f;
                });
            });
        }
    }
    // Computes rounded dS and tdS and, on request, P and tP, from dP, tdP, P (in `p`) and below (in `tp`), for columns [16 step,
    // 16 step + 16).
    template <bool kWithWeights = kKeys>
    __device__ __forceinline__ void differentiate(int step, const Numbers& p, const Numbers& tp, const Numbers& dp,
                                                  const Numbers& tdp, const RowStatistics& rows, uint32_t cols, Fragment& ds,
                                                  Fragment& tds, Fragment& rounded_p, Fragment& rounded_tp) const {
        float a[8], b[8], c[8];
        for_step(step, rows, cols, [&](int i, const TangentStatistics& of) {
            const int e = i - 8 * step;
            const float x = dp[i] - of.delta, y = tdp[i] - of.tdelta;
            a[e] = p[i] * x;
            b[e] = p[i] * fmaf(tp[i], x, y);
            if constexpr (kWithWeights) c[e] = p[i] * tp[i];
        });
        round(ds, a);
        round(tds, b);
        if constexpr (kWithWeights) {
            round(rounded_p, &p[8 * step]);
            round(rounded_tp, c);
        }
    }
    // Computes rounded P and tP from P and below.
    __device__ __forceinline__ void round_probabilities(int step, const Numbers& p, const Numbers& below, Fragment& rounded_p,
                                                        Fragment& rounded_tp) const {
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = p[8 * step + e] * below[8 * step + e];
        round(rounded_p, &p[8 * step]);
        round(rounded_tp, x);
    }

private:
    __device__ static __forceinline__ void round(Fragment& fragment, const float* x) {
#pragma unroll
        for (int i = 0; i < 4; ++i) fragment[i] = pack_pair(x[2 * i], x[2 * i + 1], T());
    }
    template <class Rule>
    __device__ static __forceinline__ void for_pairs(const RowStatistics& rows, uint32_t cols, const Rule& rule) {
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step) for_step(step, rows, cols, rule);
    }
    // Calls rule(i, statistics) for the elements of 16 columns. `cols`: shared address of the statistics of the lane's first
    // column.
    template <class Rule>
    __device__ static __forceinline__ void for_step(int step, const RowStatistics& rows, uint32_t cols, const Rule& rule) {
#pragma unroll
        for (int i = 8 * step; i < 8 * step + 8; i += 4) {
            if constexpr (kKeys) {
#pragma unroll
                for (int col = 0; col < 2; ++col) {
                    const float4 x = load_shared_16(cols + (i / 4 * 8 + col) * static_cast<int>(sizeof(TangentStatistics)));
                    const TangentStatistics of = {x.x, x.y, x.z, x.w};
                    rule(i + col, of);
                    rule(i + col + 2, of);
                }
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) rule(i + e, rows.of[e / 2]);
            }
        }
    }
};

}  // namespace libflash::cuda::sm90
