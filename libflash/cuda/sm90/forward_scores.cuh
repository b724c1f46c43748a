// The scores of a key tile in a consumer thread of the sm_90a forward kernel, in the layout of wgmma: rare options, mask of edge
// tiles, dropout.
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/sm90/forward_consumer_thread.cuh"
#include "cuda/sm90/forward_context.cuh"
#include "cuda/sm90/forward_rare_options.cuh"
#include "cuda/tile/accumulator.cuh"

namespace libflash::cuda::sm90 {

template <class Traits, bool kBiasOrMask = Traits::kRareOptions>
struct ForwardScores {
    using T = typename Traits::T;
    using WorkTile = ForwardWorkTile<Traits>;
    static constexpr int kBlockN = Traits::kBlockN, kScores = kBlockN / 2;
    using Thread = ForwardConsumerThread;
    using Scores = float[kScores];

    using RareOptions = ForwardRareOptions<Traits>;

    const ForwardContext<Traits>& context;
    const ScoreOptions options = options_of(context.params);

    // Applies the rare options and the mask. The softmax must then multiply the scores by softmax_scale(). `bias_tile`: of the
    // stage of K.
    __device__ __forceinline__ void prepare(Scores& s, const WorkTile& work_tile, int tile, const Thread& thread, bool edge,
                                            bool exact_maximum, InShared in_shared,
                                            const typename Traits::BiasTile& bias_tile) const {
        if constexpr (Traits::kRareOptions) {
            RareOptions{context}.apply(s, options, work_tile, tile, thread);
            if constexpr (kBiasOrMask)
                RareOptions{context}.apply_bias_and_mask(s, options, work_tile, tile, thread, in_shared, bias_tile);
        }
        if (exact_maximum) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) s[i] *= scale_of(work_tile);
        }
        if (edge) mask(s, work_tile, tile, thread);
    }
    __device__ __forceinline__ float softmax_scale(const WorkTile& work_tile, bool exact_maximum) const {
        return exact_maximum ? 1.0f : scale_of(work_tile);
    }

    // Over a cache: hides the keys of absent units (16 keys each).
    template <int kCount>
    __device__ __forceinline__ void hide_absent(float (&s)[kCount], uint32_t absent) const {
        if (absent == 0) return;
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            if (absent >> i / 8 & 1) s[i] = -INFINITY;
    }

    // The same for copied keys, with a bit for each key in `absent`.
    __device__ __forceinline__ void hide_absent_keys(Scores& s, const uint32_t* absent, const Thread& thread) const {
        const int column = (thread.lane & 3) * 2;
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            if (absent[i / 16] >> (i / 4 % 4 * 8 + column + i % 2) & 1) s[i] = -INFINITY;
    }

    // Multiplies the column of each key by a factor.
    __device__ __forceinline__ void scale_columns(Scores& s, const float* factors, const Thread& thread) const {
        const float* const first = factors + (thread.lane & 3) * 2;
#pragma unroll
        for (int block = 0; block < kBlockN / 8; ++block) {
            const float2 two = *reinterpret_cast<const float2*>(first + block * 8);
#pragma unroll
            for (int r = 0; r < 2; ++r) s[block * 4 + 2 * r] *= two.x, s[block * 4 + 2 * r + 1] *= two.y;
        }
    }

    // Hides the scores of a part of a tile, from `first_key` on.
    template <int kCount>
    __device__ __forceinline__ void mask_part(float (&s)[kCount], const WorkTile& work_tile, int first_key,
                                              const Thread& thread) const {
        mask_edge(work_tile.keys, first_key + first_column(0, thread),
                  [&](const auto& for_row) { for_rows(s, work_tile, thread, for_row); });
    }

    // Sets the probabilities that dropout removes to 0.
    __device__ __forceinline__ void drop(Scores& p, const WorkTile& work_tile, const TileWord& tile, const Thread& thread) const {
        const uint32_t batch_head = dropout_head(work_tile.batch(), context.params.heads_q, work_tile.head());
        constexpr int kPairs = kBlockN < 64 ? kBlockN / 16 : 4;  // pairs of blocks per word of dropout bits
#pragma unroll
        for (int block = 0; block < kBlockN / 8; block += 2 * kPairs) {
            const uint32_t keep =
                keep_bits_of_pairs<2, kPairs>(context.params.rare.dropout, batch_head, tile.tile() * kBlockN + block * 8,
                                              thread.lane, [&](int r) { return thread.row(work_tile, r); });
            zero_dropped<2 * kPairs>(
                keep, [&](int i, int n, int e) -> float& { return p[(block + i / 2 * 2 + n) * 4 + i % 2 * 2 + e]; });
        }
    }

private:
    template <class Params>
    __device__ __forceinline__ static ScoreOptions options_of(const Params& params) {
        if constexpr (Traits::kRareOptions) return ScoreOptions::of<Traits::kHeadDim>(params.rare, params.scale_log2);
        return {};
    }
    // The factor from the scores to base-2 units.
    __device__ __forceinline__ float scale_of([[maybe_unused]] const WorkTile& work_tile) const {
        if constexpr (Traits::kRareOptions) return RareOptions{context}.softmax_scale(options);
        return work_tile.scale_log2(context.params);
    }
    __device__ __forceinline__ void mask(Scores& s, const WorkTile& work_tile, int tile, const Thread& thread) const {
        mask_edge(work_tile.keys, first_column(tile, thread),
                  [&](const auto& for_row) { for_rows(s, work_tile, thread, for_row); });
    }

    __device__ __forceinline__ static int first_column(int tile, const Thread& thread) {
        return tile * kBlockN + (hide_from_compiler(thread.lane) & 3) * 2;
    }
    // Calls for_row(row, for_scores) for the two query rows of this thread.
    template <int kCount, class ForRow>
    __device__ __forceinline__ static void for_rows(float (&s)[kCount], const WorkTile& work_tile, const Thread& thread,
                                                    const ForRow& for_row) {
        for_accumulator_rows(s, [&](int, int r, const auto& for_scores) { for_row(thread.row(work_tile, r), for_scores); });
    }
};

}  // namespace libflash::cuda::sm90
