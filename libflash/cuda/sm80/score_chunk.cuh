// Backward: the elementwise operations between the products, on a transposed chunk of scores of a warp: 32 keys, kChunk queries.
// Element e of block (a, n) of lane 4 * g + t belongs to key 16 * a + g + 8 * (e / 2) and query 8 * n + 2 * t + e % 2.
//
//   p = exp(score - lse)      ds = p (keep dp / (1 - p_drop) - delta)      both times 2^exponent_shift()
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/rare_gradients.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/accumulator.cuh"
#include "cuda/tile/product.cuh"

namespace libflash::cuda::sm80 {

// Shard: ShardTile of the key tile, which only the functions for rare options read.
template <class T, int kChunk, class Tiles, class Shard>
struct ScoreChunk {
    static constexpr int kBlocks = kChunk / 4;  // blocks of 16 keys and 8 queries
    using Scores = float[2][kChunk / 8][4];
    using Fragments = uint32_t[kChunk / 16][2][4];  // rounded; left operand of a product over queries

    const BackwardParams& params;
    const Tiles& tiles;
    int head;                  // query head
    int first_row, first_col;  // of this lane
    const float4* statistics;  // of this lane's rows: statistics[4 * n] holds (LSE, delta) of the two rows in blocks n
    const Shard& shard;

    __device__ __forceinline__ ScoreChunk(const BackwardParams& p, const Tiles& t, int query_head, int row, int col,
                                          const SoftmaxStatistics* softmax_statistics, const Shard& shard_tile)
        : params(p), tiles(t), head(query_head), shard(shard_tile) {
        const int lane = threadIdx.x % 32;
        first_row = row + lane % 4 * 2;
        first_col = col + lane / 4;
        statistics = reinterpret_cast<const float4*>(softmax_statistics + lane % 4 * 2);
    }

    // Applies the causal mask, the window and the lengths.
    __device__ __forceinline__ void mask_edge(Scores& s) const {
        mask_edge_transposed(tiles, first_row, first_col, -INFINITY, s);
    }

    // Converts dot products to probabilities. One call processes part `share` of kShares of the elements, so that a caller can
    // interleave the calls with a product.
    template <int kShares>
    __device__ __forceinline__ void exponentiate(Scores& s, int share) const {
#pragma unroll
        for (int i = share * kBlocks / kShares; i < (share + 1) * kBlocks / kShares; ++i) {
            const float4 f = statistics[i / 2 * 4];
            float (&x)[4] = s[i % 2][i / 2];
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = exp2_approx(fmaf(x[e], params.scale_log2, e & 1 ? -f.z : -f.x));
        }
    }
    // Converts dp to ds, in parts as above.
    template <int kShares>
    __device__ __forceinline__ void differentiate(Scores& dp, const Scores& p, int share) const {
#pragma unroll
        for (int i = share * kBlocks / kShares; i < (share + 1) * kBlocks / kShares; ++i) {
            const float4 f = statistics[i / 2 * 4];
            float (&x)[4] = dp[i % 2][i / 2];
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = p[i % 2][i / 2][e] * (x[e] - (e & 1 ? f.w : f.y));
        }
    }

    __device__ static __forceinline__ void round(Fragments& f, const Scores& s) {
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)
#pragma unroll
            for (int a = 0; a < 2; ++a) to_fragment<T>(f[step][a], s[a][2 * step], s[a][2 * step + 1]);
    }

    // The rest is for rare options. Converts the dot products s and dp to P and dS. `keep`: from keep_bits().
    __device__ __forceinline__ void apply_rules(Scores& s, Scores& dp, uint32_t keep, bool edge) const {
        const auto at = [&](int i) -> GradientElement {
            const int a = i / 4 % 2, n = i / 8, e = i % 4;
            const float4 f = statistics[n * 4];
            return {s[a][n][e],        dp[a][n][e],      first_row + n * 8 + (e & 1), first_col + a * 16 + (e >> 1) * 8,
                    e & 1 ? f.z : f.x, e & 1 ? f.w : f.y};
        };
        const auto mask_ranges = [&] {
            if (edge) mask_edge_transposed_by_ranges(shard.seen + (first_col - tiles.first_col), first_row, s);
        };
        apply_rare_options<T, kBlocks * 4>(params.rare, params.softmax_scale, tiles, shard.all.alibi_shift, head, keep, at,
                                           mask_ranges);
    }

    // Dropout mask: bit i is set if element i of apply_rules() is kept.
    __device__ __forceinline__ uint32_t keep_bits() const {
        const DropoutParams& dropout = params.rare.dropout;
        if (!dropout.active) return 0xffffffffu;
        const uint32_t batch_head = dropout_head(params.shard, tiles.batch, head);
        if (shard.all.has_positions) {
            const auto row = [&](int i) { return shard.all.rows.at(first_row + i / 8 * 8 + (i & 1)); };
            const auto col = [&](int i) { return shard.all.columns.at(first_col + i / 4 % 2 * 16 + (i >> 1 & 1) * 8); };
            return keep_bits_of_elements<kBlocks * 4>(dropout, batch_head, row, col);
        }
        const int lane = threadIdx.x % 32;
        return keep_bits_transposed<kBlocks>(dropout, batch_head, first_row, first_col - lane / 4, lane);
    }
};

}  // namespace libflash::cuda::sm80
