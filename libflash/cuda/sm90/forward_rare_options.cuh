// The rare options in a consumer thread of the sm_90a forward kernel: softcap, ALiBi, bias and boolean mask, from dot products to
// scores.
#pragma once

#include "cuda/attention/quick_softcap.cuh"
#include "cuda/attention/row_bias.cuh"
#include "cuda/attention/row_mask.cuh"
#include "cuda/attention/scores.cuh"
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
    using ScoreTile = typename Traits::ScoreTile;

    const ForwardContext<Traits>& context;

    // What the score tile of a stage holds.
    enum class Copied { nothing, bias, mask };
    __device__ __forceinline__ Copied copied(const WorkTile& work_tile, int tile) const {
        if constexpr (Traits::kScoreTiles) {
            const RareParams& rare = context.params.rare;
            if (rare.bias.data && !rare.bias.is_float && ScoreTile::can_copy(bias_rows<T>(work_tile, tile))) return Copied::bias;
            if (rare.mask.data && ScoreTile::can_copy(mask_rows(work_tile, tile))) return Copied::mask;
        }
        return Copied::nothing;
    }
    // Begins to copy it. A warp calls it.
    __device__ __forceinline__ void copy(const ScoreTile& to, const WorkTile& work_tile, int tile, int lane) const {
        const Copied copied = this->copied(work_tile, tile);
        const int first_row = work_tile.keys.first_row;
        if (copied == Copied::bias) to.copy(bias_rows<T>(work_tile, tile), first_row, lane);
        if (copied == Copied::mask) to.copy(mask_rows(work_tile, tile), first_row, lane);
    }
    // Prefetches into L2 what is not copied of the bias and the mask of a key tile. A warp calls it.
    __device__ __forceinline__ void prefetch(const WorkTile& work_tile, int tile, int lane) const {
        const RareParams& rare = context.params.rare;
        const Copied has_copy = copied(work_tile, tile);
        if (rare.bias.data && has_copy != Copied::bias)
            prefetch_rows(rare.bias, work_tile.rules.bias, rare.bias.is_float ? 4 : 2, work_tile, tile, lane);
        if (rare.mask.data && has_copy != Copied::mask) prefetch_rows(rare.mask, work_tile.rules.mask, 1, work_tile, tile, lane);
    }

    // Turns dot products into scores, which softmax_scale() converts to base-2 units.
    __device__ __forceinline__ void apply(Scores& s, const WorkTile& work_tile, int tile, const Thread& thread,
                                          const ScoreTile& score_tile) const {
        const RareParams& rare = context.params.rare;
        const Copied has_copy = copied(work_tile, tile);
        const int first_key = tile * kBlockN + (hide_from_compiler(thread.lane) & 3) * 2;
        const auto for_rows = [&](const auto& for_row) {
            for_accumulator_rows(s, [&](int, int r, const auto& for_scores) { for_row(thread.row(work_tile, r), for_scores); });
        };
        const auto for_all = [&](const auto& rule) {
            for_rows([&](int row, const auto& for_scores) {
                for_scores([&](float& score, int key) { rule(score, row, first_key + key); });
            });
        };
        // The bias is added by the multiplication with the scale, where no option is between them.
        // With more than 128 channels there are too few registers for this.
        const bool scales_with_bias =
            Traits::kHeadDim <= 128 && rare.bias.data && !(rare.softcap > 0.0f) && !rare.alibi_slopes.data;
        if (in_natural_units() && !scales_with_bias) scale_and_cap_quickly(rare, context.params.softmax_scale, for_all);
        if (rare.alibi_slopes.data) subtract_alibi(work_tile.rules, first_key, for_rows);
        const int row = thread.row(work_tile, 0);
        if (rare.bias.data) {
            const float factor = scales_with_bias ? context.params.softmax_scale : 1.0f;
            if (has_copy == Copied::bias) {
                score_tile.template add_bias<T>(s, factor, thread);
            } else {
                add_bias(s, factor, work_tile, tile, row, thread.lane);
            }
        }
        if (rare.mask.data) {
            if (has_copy == Copied::mask) {
                score_tile.hide(s, thread);
            } else {
                hide_by_row_mask<kBlockN>(s, mask_rows(work_tile, tile), row, thread.lane);
            }
        }
    }
    __device__ __forceinline__ float softmax_scale() const { return in_natural_units() ? kLog2e : context.params.scale_log2; }

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
    // Whether apply() multiplies the dot products by softmax_scale. Otherwise the softmax does.
    __device__ __forceinline__ bool in_natural_units() const {
        const RareParams& rare = context.params.rare;
        return rare.softcap > 0.0f || rare.alibi_slopes.data || rare.bias.data || !(context.params.scale_log2 > 0.0f);
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
