// Turns dot products into scores in the sm_90a decode kernel for many rows: softcap, ALiBi, and the masks, including tree masks.
#pragma once

#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/sm90/decode_rows_storage.cuh"

namespace libflash::cuda::sm90 {

// The scores of a consumer thread for one tile of keys: two query rows, and two of each eight keys.
template <class Traits>
struct DecodeRowsScores {
    static constexpr int kScores = Traits::kBlockN / 2;
    using Scores = float[kScores];

    const DecodeRowsContext<Traits>& context;
    const int row, column;  // the thread's first row of the work tile, and its first key of a tile

    // Returns the factor by which the softmax must multiply the scores to get base-2 units.
    __device__ __forceinline__ float apply_options(Scores& s, int first_key) const {
        const DecodeParams& params = context.params;
        if (!(params.softcap > 0.0f) && !params.alibi_slopes.data) return params.scale_log2;
        scale_and_cap_log2(params, [&](const auto& rule) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) rule(s[i], 0, 0);
        });
        if (params.alibi_slopes.data) subtract_distances(s, first_key);
        return 1.0f;
    }
    __device__ __forceinline__ void mask(Scores& s, int first_key) const {
        mask_edge_by_ranges(context.storage.seen, 0, first_key + column, [&](const auto& for_row) {
            for_accumulator_rows(s, [&](int, int r, const auto& for_scores) { for_row(row + 8 * r, for_scores); });
        });
        if (context.params.ragged.tree.data) hide_gaps(s, first_key);
    }
    // Hides absent keys; `absent`: a bit for each unit of 16 keys that does not exist.
    __device__ __forceinline__ static void hide_absent(Scores& s, uint32_t absent) {
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            if (absent >> i / 8 & 1) s[i] = -INFINITY;
    }

private:
    __device__ __forceinline__ void subtract_distances(Scores& s, int first_key) const {
        for_accumulator_rows(s, [&](int, int r, const auto& for_scores) {
            const float slope = context.storage.slope[row + 8 * r];
            const int position = context.storage.shift + query_row(r) - first_key - column;
            for_scores([&](float& score, int col) { subtract_alibi(score, slope, position, col); });
        });
    }
    // Hides the gaps of trees: of its key range, a row sees only the keys whose bits are set.
    __device__ __forceinline__ void hide_gaps(Scores& s, int first_key) const {
        const DecodeWorkTile& work_tile = context.storage.work_tile;
        const TreeBits bits = TreeBits::of(context.params.ragged.tree, work_tile.rows.batch);
        const int first = first_key - context.storage.shift;  // of the last keys
        if (bits.rows == 0 || first + Traits::kBlockN <= 0) return;
        for_accumulator_rows(s, [&](int, int r, const auto& for_scores) {
            const uint64_t seen = bits_of_tile(bits, query_row(r), first) >> column;
            for_scores([&](float& score, int col) {
                if (!(seen >> col & 1)) score = -INFINITY;
            });
        });
    }
    // Bit n: whether the row sees key `first` + n of the last keys. Keys before the last keys (negative numbers) are seen.
    __device__ __forceinline__ uint64_t bits_of_tile(const TreeBits& bits, int query, int first) const {
        const TreeParams& tree = context.params.ragged.tree;
        const auto word = [&](int n) -> uint64_t {
            if (n < 0) return 0xffffffffu;
            return n < tree.words && query < bits.rows ? static_cast<uint32_t>(bits.first[query * tree.row + n * tree.word]) : 0u;
        };
        const int from = first >> 5, by = first & 31;  // also of negative numbers
        const uint64_t low = word(from + 1) << 32 | word(from), high = word(from + 2) << 32 | word(from + 1);
        return high >> by << 32 | (low >> by & 0xffffffffu);
    }
    // The query row of a row of the work tile. For a row that does not exist: the last query row.
    __device__ __forceinline__ int query_row(int r) const {
        const RaggedWorkTile& rows = context.storage.work_tile.rows;
        return divide(rows.first_row + min(row + 8 * r, rows.rows - 1), context.params.by_group);
    }
};

}  // namespace libflash::cuda::sm90
