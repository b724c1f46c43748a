// The scores of a key tile in a consumer thread of the sm_90a forward kernel, in the layout of wgmma: rare options, mask of edge
// tiles, dropout.
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/sm90/forward_consumer_thread.cuh"
#include "cuda/sm90/forward_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardScores {
    using T = typename Traits::T;
    using WorkTile = ForwardWorkTile<Traits>;
    static constexpr int kBlockN = Traits::kBlockN, kScores = kBlockN / 2;
    using Thread = ForwardConsumerThread;
    using Scores = float[kScores];

    const ForwardContext<Traits>& context;

    // Applies what comes before the softmax. The scores are then to be multiplied by softmax_scale().
    __device__ __forceinline__ void prepare(Scores& s, const WorkTile& work_tile, int tile, const Thread& thread, bool edge,
                                            bool exact_maximum) const {
        if constexpr (Traits::kRareOptions) {
            apply_rare_options(s, work_tile, tile, thread);
        } else if (exact_maximum) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) s[i] *= context.params.scale_log2;
        }
        if (edge) mask(s, work_tile, tile, thread);
    }
    __device__ __forceinline__ float softmax_scale(bool exact_maximum) const {
        return Traits::kRareOptions || exact_maximum ? 1.0f : context.params.scale_log2;
    }

    // Sets the probabilities that dropout removes to 0.
    __device__ __forceinline__ void drop(Scores& p, const WorkTile& work_tile, const TileWord& tile, const Thread& thread) const {
        const DropoutParams& dropout = context.params.rare.dropout;
        const uint32_t batch_head = static_cast<uint32_t>(work_tile.batch()) * context.params.heads_q + work_tile.head();
#pragma unroll
        for (int block = 0; block < kBlockN / 8; block += 2) {
            uint32_t keep = 0;
#pragma unroll 1
            for (int r = 0; r < 2; ++r) {
                uint2 words[2];
                dropout_words_of_row(dropout, batch_head, thread.row(work_tile, r), tile.tile() * kBlockN + block * 8,
                                     thread.lane, words);
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    keep |= ((words[n].x >= dropout.threshold ? 1u : 0u) | (words[n].y >= dropout.threshold ? 2u : 0u))
                            << (r * 4 + n * 2);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)  // row i / 4, block i / 2 % 2, column i % 2
                if (!(keep >> i & 1)) p[(block + i / 2 % 2) * 4 + i / 4 * 2 + i % 2] = 0.0f;
        }
    }

private:
    // Turns dot products into scores in base-2 units, with the rare options.
    __device__ __forceinline__ void apply_rare_options(Scores& s, const WorkTile& work_tile, int tile,
                                                       const Thread& thread) const {
        const int rows = work_tile.q_rows.length, cols = work_tile.keys.length_k;
        const auto for_all = [&](const auto& rule) {
            const int first_col = tile * kBlockN + (hide_from_compiler(thread.lane) & 3) * 2;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = thread.row(work_tile, r);
#pragma unroll
                for (int i = 2 * r; i < kScores; i += 4)
#pragma unroll
                    for (int e = 0; e < 2; ++e) rule(s[i + e], row, first_col + i / 4 * 8 + e);
            }
        };
        const auto for_each = [&](const auto& rule) {
            for_all([&](float& score, int row, int col) {
                if (row < rows && col < cols) rule(score, row, col);
            });
        };
        scale_and_cap(context.params.rare, context.params.softmax_scale, for_all);
        add_and_hide<T>(context.params.rare, work_tile.rules, for_all, for_each);
    }

    __device__ __forceinline__ void mask(Scores& s, const WorkTile& work_tile, int tile, const Thread& thread) const {
        const auto& keys = work_tile.keys;
        const int first_col = tile * kBlockN + (hide_from_compiler(thread.lane) & 3) * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Keys that the row sees, relative to this lane's first column: [begin, end).
            const int row = thread.row(work_tile, r);
            const int begin = row + keys.shift - keys.left - first_col;
            const int end = min(keys.length_k, row + keys.shift + keys.right + 1) - first_col;
#pragma unroll
            for (int i = 2 * r; i < kScores; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int col = i / 4 * 8 + e;
                    if (col < begin || col >= end) s[i + e] = -INFINITY;
                }
        }
    }
};

}  // namespace libflash::cuda::sm90
