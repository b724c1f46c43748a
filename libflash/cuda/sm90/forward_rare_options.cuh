// The rare options in a consumer thread of the sm_90a forward kernel: softcap, ALiBi, bias and boolean mask, from dot products to
// scores.
#pragma once

#include "cuda/attention/quick_softcap.cuh"
#include "cuda/attention/row_bias.cuh"
#include "cuda/attention/row_mask.cuh"
#include "cuda/attention/score_options.cuh"
#include "cuda/ptx/prefetch.cuh"
#include "cuda/sm90/forward_consumer_thread.cuh"
#include "cuda/sm90/forward_context.cuh"
#include "cuda/tile/accumulator.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardRareOptions {
    using T = typename Traits::T;
    using WorkTile = ForwardWorkTile<Traits>;
    using Thread = ForwardConsumerThread;
    static constexpr int kBlockN = Traits::kBlockN, kScores = kBlockN / 2;
    using Scores = float[kScores];
    using BiasTile = typename Traits::BiasTile;

    const ForwardContext<Traits>& context;

    // What is to be copied into the stage of K of a tile.
    __device__ __forceinline__ InShared to_copy(const WorkTile& work_tile, int tile) const {
        if constexpr (Traits::kBiasTiles) {
            const RareParams& rare = context.params.rare;
            if (rare.bias.data && !rare.bias.is_float && BiasTile::can_copy(bias_rows<T>(work_tile, tile))) return InShared::bias;
            if (rare.mask.data && BiasTile::can_copy(mask_rows(work_tile, tile))) return InShared::mask;
        }
        return InShared::nothing;
    }
    // Begins to copy it. A warp calls it.
    __device__ __forceinline__ void copy(InShared what, const BiasTile& to, const WorkTile& work_tile, int tile, int lane) const {
        const int first_row = work_tile.keys.first_row;
        if (what == InShared::bias) to.copy(bias_rows<T>(work_tile, tile), first_row, lane);
        if (what == InShared::mask) to.copy(mask_rows(work_tile, tile), first_row, lane);
    }
    // Prefetches into L2 what is not copied of the bias and the mask of a key tile. A warp calls it.
    __device__ __forceinline__ void prefetch(const WorkTile& work_tile, int tile, int lane) const {
        const RareParams& rare = context.params.rare;
        const InShared copied = to_copy(work_tile, tile);
        if (rare.bias.data && copied != InShared::bias)
            prefetch_rows(rare.bias, work_tile.rules.bias, rare.bias.is_float ? 4 : 2, work_tile, tile, lane);
        if (rare.mask.data && copied != InShared::mask) prefetch_rows(rare.mask, work_tile.rules.mask, 1, work_tile, tile, lane);
    }

    // Turns dot products into scores, which softmax_scale() converts to base-2 units; then a bias is added and a mask applied.
    __device__ __forceinline__ void apply(Scores& s, ScoreOptions options, const WorkTile& work_tile, int tile,
                                          const Thread& thread) const {
        const RareParams& rare = context.params.rare;
        const int first_key = tile * kBlockN + (hide_from_compiler(thread.lane) & 3) * 2;
        const auto for_rows = [&](const auto& for_row) {
            for_accumulator_rows(s, [&](int, int r, const auto& for_scores) { for_row(thread.row(work_tile, r), for_scores); });
        };
        const auto for_all = [&](const auto& rule) {
            for_rows([&](int row, const auto& for_scores) {
                for_scores([&](float& score, int key) { rule(score, row, first_key + key); });
            });
        };
        if (options.has(ScoreOptions::kScales)) scale_and_cap_quickly(rare, context.params.softmax_scale, for_all);
        if (options.has(ScoreOptions::kAlibi)) subtract_alibi(work_tile.rules, first_key, for_rows);
    }
    // `in_shared`: what `bias_tile` holds.
    __device__ __forceinline__ void apply_bias_and_mask(Scores& s, ScoreOptions options, const WorkTile& work_tile, int tile,
                                                        const Thread& thread, InShared in_shared,
                                                        const BiasTile& bias_tile) const {
        const int row = thread.row(work_tile, 0);
        if (options.has(ScoreOptions::kBias)) {
            const float factor = options.has(ScoreOptions::kWithBias) ? context.params.softmax_scale : 1.0f;
            if (in_shared == InShared::bias) {
                bias_tile.template add_bias<T>(s, factor, thread);
            } else {
                add_bias(s, factor, work_tile, tile, row, thread.lane);
            }
        }
        if (options.has(ScoreOptions::kMask)) {
            if (in_shared == InShared::mask) {
                bias_tile.hide(s, work_tile.q_rows.length - work_tile.keys.first_row, thread);
            } else {
                hide_by_row_mask<kBlockN>(s, mask_rows(work_tile, tile), row, thread.lane);
            }
        }
    }
    __device__ __forceinline__ float softmax_scale(ScoreOptions options) const {
        return options.has(ScoreOptions::kNatural) ? kLog2e : context.params.scale_log2;
    }

private:
    template <class Number>
    __device__ __forceinline__ ScoreRows<Number> bias_rows(const WorkTile& work_tile, int tile) const {
        return {context.params.rare.bias, work_tile.rules.bias, tile * kBlockN, work_tile.q_rows.length, work_tile.keys.length_k};
    }
    __device__ __forceinline__ MaskRows mask_rows(const WorkTile& work_tile, int tile) const {
        return {context.params.rare.mask, work_tile.rules.mask, tile * kBlockN, work_tile.q_rows.length, work_tile.keys.length_k};
    }
    __device__ __forceinline__ void add_bias(Scores& s, float factor, const WorkTile& work_tile, int tile, int row,
                                             int lane) const {
        const ScoreParams& bias = context.params.rare.bias;
        if (bias.is_float) {
            add_row_bias<kBlockN>(s, factor, bias_rows<float>(work_tile, tile), row, lane);
        } else {
            add_row_bias<kBlockN>(s, factor, bias_rows<T>(work_tile, tile), row, lane);
        }
    }
    // Of one (batch, head).
    __device__ __forceinline__ void prefetch_rows(const ScoreParams& tensor, const void* of_head, int bytes,
                                                  const WorkTile& work_tile, int tile, int lane) const {
        constexpr int kLine = 128;
        if (tensor.stride[3] != 1) return;
        const int first_row = work_tile.keys.first_row, first_key = tile * kBlockN,
                  rows = tensor.stride[2] == 0 ? 1 : min(work_tile.q_rows.length - first_row, Traits::kBlockM),
                  count = min(work_tile.keys.length_k - first_key, kBlockN) * bytes;
        const char* const first =
            static_cast<const char*>(of_head) + (first_row * tensor.stride[2] + first_key) * static_cast<int64_t>(bytes);
#pragma unroll 1
        for (int row = lane; row < rows; row += 32) {
            const char* const of_row = first + row * tensor.stride[2] * bytes;
#pragma unroll 1
            for (int at = 0; at < count; at += kLine) prefetch_to_l2(of_row + at);
        }
    }
    // As cuda::subtract_alibi(), but an integer is converted for each row, not for each score: below 2^24 the difference of two
    // integers is exact.
    template <class ForRows>
    __device__ __forceinline__ void subtract_alibi(const ScoreRules<T>& rules, int first_key, const ForRows& for_rows) const {
        const float slope = rules.slope;
        for_rows([&](int row, const auto& for_scores) {
            const float distance = static_cast<float>(row + rules.alibi_shift - first_key);
            for_scores([&](float& score, int key) { score = fmaf(-slope, fabsf(distance - static_cast<float>(key)), score); });
        });
    }
};

}  // namespace libflash::cuda::sm90
