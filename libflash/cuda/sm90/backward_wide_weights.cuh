// The weights of a tile in a consumer thread of the sm_90a backward kernels for wide heads, in the layout of wgmma: P or dS,
// computed from dot products.
#pragma once

#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/sm90/backward_wide_storage.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardWideWeights {
    using T = typename Traits::T;
    static constexpr int kScores = 32;
    using Scores = float[kScores];
    using Fragments = uint32_t[kScores / 8][4];  // rounded
    static constexpr int kEightQueries = 8 * static_cast<int>(sizeof(SoftmaxStatistics));

    const BackwardWideContext<Traits>& context;
    SoftmaxStatistics of_rows[Traits::kKeys ? 1 : 2];  // dq: of the thread's rows

    // dq: `row` is the thread's first row in its sequence.
    __device__ __forceinline__ void load_row_statistics(int row) {
        if constexpr (!Traits::kKeys) {
            const auto& work = context.storage.work_tile;
            const SoftmaxStatistics* const statistics =
                context.params.softmax_statistics +
                QueryUnits::first(context.params, work.at.head, work.units_before) * kUnitRows + row;
            of_rows[0] = statistics[0], of_rows[1] = statistics[8];
        }
    }

    // Turns s into P or dS, times 2^exponent_shift(), for a tile of columns; dp: only for dS. `statistics`: shared address of the
    // statistics of the lane's first column, if columns are queries.
    __device__ __forceinline__ void weigh(Scores& s, Scores& dp, uint32_t statistics) const {
        const float cap = context.params.rare.softcap, scale = context.params.scale_log2;
        if (__builtin_expect(cap > 0.0f, false)) {
            cap_scores(s, dp, statistics, cap);
        } else {
            for_first<kScores>(statistics, [&](int i, float lse_log2, float delta) {
                s[i] = fmaf(s[i], scale, -lse_log2);
                dp[i] -= delta;
            });
        }
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = Traits::kDifferences ? exp2_approx(s[i]) * dp[i] : exp2_approx(s[i]);
    }
    // Weights that the causal mask, the window or the lengths hide become 0, even if they are NaN. `row`, `column`: the lane's
    // first row and column in their sequences.
    __device__ __forceinline__ void hide(Scores& weights, int row, int column) const {
        const auto& tiles = context.storage.work_tile.tiles;
        if constexpr (Traits::kKeys) {
            mask_edge_transposed(tiles, column, row, 0.0f, weights);
        } else {
            for_accumulator_rows(weights, [&](int, int r, const auto& for_weights) {
                const VisibleRange keys = keys_seen_by(tiles, row + 8 * r, column);
                for_weights([&](float& weight, int col) {
                    if (col < keys.begin || col >= keys.end) weight = 0.0f;
                });
            });
        }
    }
    __device__ static __forceinline__ void round(const Scores& weights, Fragments& rounded) {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) rounded[i / 4][i % 4] = pack_pair(weights[2 * i], weights[2 * i + 1], T());
    }

private:
    // Softcap: eight scores at a time, in a loop that rotates the scores, so that the code is small.
    static constexpr int kTogether = 8;
    __device__ __forceinline__ void cap_scores(Scores& s, Scores& dp, uint32_t statistics, float cap) const {
        const float inverse = context.params.softmax_scale / cap;
#pragma unroll 1
        for (int pass = 0; pass < kScores / kTogether; ++pass) {
            for_first<kTogether>(statistics, [&](int i, float lse_log2, float delta) {
                const float capped = tanh_accurate(s[i] * inverse);
                s[i] = fmaf(capped, cap * kLog2e, -lse_log2);
                dp[i] = (dp[i] - delta) * fmaf(-capped, capped, 1.0f);
            });
            statistics += kTogether / 4 * kEightQueries;
            rotate(s);
            if constexpr (Traits::kDifferences) rotate(dp);
        }
    }
    __device__ static __forceinline__ void rotate(Scores& x) {
        float first[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) first[i] = x[i];
#pragma unroll
        for (int i = 0; i < kScores; ++i) x[i] = i + kTogether < kScores ? x[i + kTogether] : first[i + kTogether - kScores];
    }
    // Calls rule(i, LSE, delta) with the statistics of the query of each of the first scores.
    template <int kCount, class Rule>
    __device__ __forceinline__ void for_first(uint32_t statistics, const Rule& rule) const {
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            float4 two;  // queries
            if constexpr (Traits::kKeys) two = load_shared_16(statistics + i / 4 * kEightQueries);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if constexpr (Traits::kKeys) {
                    rule(i + e, e % 2 ? two.z : two.x, e % 2 ? two.w : two.y);
                } else {
                    rule(i + e, of_rows[e / 2].lse_log2, of_rows[e / 2].delta);
                }
            }
        }
    }
};

}  // namespace libflash::cuda::sm90
