// The scores of a tile in a consumer thread of the sm_90a backward kernel. They are transposed (tile/accumulator.cuh): a warp has
// 16 keys and all queries of the tile.
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/backward_context.cuh"
#include "cuda/tile/accumulator.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardScores {
    using T = typename Traits::T;
    static constexpr int kBlockM = Traits::kBlockM, kScores = kBlockM / 2;
    using Scores = float[kScores];
    using Fragments = uint32_t[kBlockM / 16][4];  // rounded
    using Numbers = float[kBlockM / 4];           // LSE or delta of this lane's queries

    const BackwardContext<Traits>& context;

    // The statistics of the lane's first query in a stage.
    __device__ __forceinline__ const SoftmaxStatistics* statistics_of_lane(int stage, int lane) const {
        return context.tiles.statistics(stage) + (lane & 3) * 2;
    }
    __device__ static __forceinline__ void load_lse(Numbers& lse_log2, const SoftmaxStatistics* of_lane) {
#pragma unroll
        for (int i = 0; i < kBlockM / 4; ++i) lse_log2[i] = of_lane[i / 2 * 8 + i % 2].lse_log2;
    }
    __device__ static __forceinline__ void load_delta(Numbers& delta, const SoftmaxStatistics* of_lane) {
#pragma unroll
        for (int i = 0; i < kBlockM / 4; ++i) delta[i] = of_lane[i / 2 * 8 + i % 2].delta;
    }

    // The shared address of these statistics; `tiles`: the shared address of all tiles.
    __device__ static __forceinline__ uint32_t statistics_of_lane(uint32_t tiles, int stage, int lane) {
        using Tiles = BackwardSharedTiles<Traits>;
        return tiles + Tiles::kStatisticsAt + stage * Tiles::kStatisticsBytes +
               (lane & 3) * 2 * static_cast<int>(sizeof(SoftmaxStatistics));
    }

    static constexpr int kEightQueries = 8 * static_cast<int>(sizeof(SoftmaxStatistics));

    // P = exp(S - LSE) * 2^exponent_shift(); the statistics contain the shift.
    __device__ __forceinline__ void exponentiate(Scores& p, const Numbers& lse_log2) const {
#pragma unroll
        for (int i = 0; i < kScores; ++i) p[i] = exp2_approx(fmaf(p[i], context.params.scale_log2, -lse_log2[i / 4 * 2 + i % 2]));
    }
    // Applies the causal mask, the window and the lengths to probabilities: a hidden probability becomes 0 even if its score is
    // NaN. `first_key`: of the warp, in the key tile.
    __device__ __forceinline__ void mask_edge(Scores& p, int first_key, int lane, int tile) const {
        const auto& tiles = context.tile().tiles;
        const int hidden_lane = hide_from_compiler(lane), first_row = tile * kBlockM + (hidden_lane & 3) * 2;
        for_accumulator_rows(p, [&](int, int r, const auto& for_scores) {
            // Query rows that see the key, relative to this lane's first row: [begin, end).
            const int key = tiles.first_col + first_key + r * 8 + (hidden_lane >> 2);
            const int begin = key - tiles.shift - tiles.right - first_row;
            const int end = key < tiles.length_k ? min(tiles.length_q, key - tiles.shift + tiles.left + 1) - first_row : -1;
            for_scores([&](float& probability, int row) {
                if (row < begin || row >= end) probability = 0.0f;
            });
        });
    }
    // dS = P (dP - delta), with the same factor 2^exponent_shift().
    __device__ static __forceinline__ void differentiate(Scores& ds, const Scores& p, const Numbers& delta) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) ds[i] = p[i] * (ds[i] - delta[i / 4 * 2 + i % 2]);
    }
    // As exponentiate() above, for callers with few registers: reads the statistics of two queries at a time. `statistics`: the
    // shared address of the statistics of the lane's first query.
    __device__ __forceinline__ void exponentiate(Scores& p, uint32_t statistics) const {
#pragma unroll
        for (int i = 0; i < kScores; i += 4) {
            const float4 two = load_shared_16(statistics + i / 4 * kEightQueries);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                p[i + e] = exp2_approx(fmaf(p[i + e], context.params.scale_log2, shifted(-(e % 2 ? two.z : two.x))));
        }
    }
    // For kCount / 2 queries, beginning with the first query of `p` and `statistics`.
    template <int kCount>
    __device__ static __forceinline__ void differentiate(float (&ds)[kCount], const float* p, uint32_t statistics) {
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const float4 two = load_shared_16(statistics + i / 4 * kEightQueries);
#pragma unroll
            for (int e = 0; e < 4; ++e) ds[i + e] = p[i + e] * (ds[i + e] - (e % 2 ? two.w : two.y));
        }
    }
    // For queries [16 * step, 16 * step + 16), from rounded P.
    __device__ static __forceinline__ void differentiate_step(Scores& ds, const uint32_t (&p)[4], int step, uint32_t statistics) {
#pragma unroll
        for (int i = 8 * step; i < 8 * step + 8; i += 4) {
            const float4 two = load_shared_16(statistics + i / 4 * kEightQueries);
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const uint32_t pair = p[(i % 8 + e) / 2];
                ds[i + e] = low_of(pair, T()) * difference(ds[i + e], two.y);
                ds[i + e + 1] = high_of(pair, T()) * difference(ds[i + e + 1], two.w);
            }
        }
    }
    // dP - delta, for P times 2^kProbabilityShift.
    __device__ static __forceinline__ float difference(float dp, float delta) {
        if constexpr (Traits::kProbabilityShift == 0) return dp - delta;
        return fmaf(dp, Traits::kUndoProbabilityShift, -delta * Traits::kUndoProbabilityShift);
    }
    // The exponent of P times 2^kProbabilityShift.
    __device__ static __forceinline__ float shifted(float exponent) {
        return Traits::kProbabilityShift == 0 ? exponent : exponent + Traits::kProbabilityShift;
    }
    template <int kSteps>
    __device__ static __forceinline__ void round(uint32_t (&rounded)[kSteps][4], const float* x) {
#pragma unroll
        for (int i = 0; i < kSteps * 4; ++i) rounded[i / 4][i % 4] = pack_pair(x[2 * i], x[2 * i + 1], T());
    }
};

}  // namespace libflash::cuda::sm90
