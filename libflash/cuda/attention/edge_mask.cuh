// The mask of edge tiles: the causal rule, the window and the sequence ends. One function computes which keys a query row sees;
// the others apply the mask to the accumulators of a thread. `Tiles` is a KeyRange or a QueryTiles. (Decode has positions with
// padding and pages: VisibleKeys in decode_keys.cuh.)
#pragma once

#include "cuda/tile/accumulator.cuh"

namespace libflash::cuda {

// Positions [begin, end).
struct VisibleRange {
    int begin, end;
};

// The keys that a query row sees, relative to the key `origin`.
template <class Tiles>
__device__ __forceinline__ VisibleRange keys_seen_by(const Tiles& tiles, int row, int origin) {
    const int begin = row + tiles.shift - tiles.left - origin;
    const int end = min(tiles.length_k, row + tiles.shift + tiles.right + 1) - origin;
    return {begin, end};
}

// Sets the hidden scores of a thread to -infinity. for_rows(for_row) calls for_row(row, for_scores) for each of its query rows;
// for_scores(rule) calls rule(score, column) for the scores of that row, with columns relative to first_col.
template <class Tiles, class ForRows>
__device__ __forceinline__ void mask_edge(const Tiles& tiles, int first_col, const ForRows& for_rows) {
    for_rows([&](int row, const auto& for_scores) {
        const VisibleRange keys = keys_seen_by(tiles, row, first_col);
        for_scores([&](float& score, int col) {
            const bool hides = col < keys.begin || col >= keys.end;
            if (hides) score = -INFINITY;
        });
    });
}

// As above, with the range of each row in shared memory: seen[row - first_row_of_tile] (shard.cuh).
template <class ForRows>
__device__ __forceinline__ void mask_edge_by_ranges(const int2* seen, int first_row_of_tile, int first_col,
                                                    const ForRows& for_rows) {
    for_rows([&](int row, const auto& for_scores) {
        const int2 keys = seen[row - first_row_of_tile];
        const int begin = keys.x - first_col, end = keys.y - first_col;
        for_scores([&](float& score, int col) {
            const bool hides = col < begin || col >= end;
            if (hides) score = -INFINITY;
        });
    });
}

// For transposed scores, whose accumulator has a row for each key. first_row and first_key: the lane's. A hidden element becomes
// `hidden`: -infinity for a score, 0 for a probability.
template <class Tiles, class Accumulator>
__device__ __forceinline__ void mask_edge_transposed(const Tiles& tiles, int first_row, int first_key, float hidden,
                                                     Accumulator& scores) {
    for_accumulator_rows(scores, [&](int a, int r, const auto& for_scores) {
        // Rows [begin, end), relative to first_row, see the key.
        const int key = first_key + a * 16 + r * 8;
        const int begin = key - tiles.shift - tiles.right - first_row;
        const int end = key < tiles.length_k ? min(tiles.length_q, key - tiles.shift + tiles.left + 1) - first_row : -1;
        for_scores([&](float& score, int row) {
            const bool hides = row < begin || row >= end;
            if (hides) score = hidden;
        });
    });
}

// For transposed scores, with the range of rows of each key in shared memory. seen: the range of the lane's first key.
template <class Accumulator>
__device__ __forceinline__ void mask_edge_transposed_by_ranges(const int2* seen, int first_row, Accumulator& scores) {
    for_accumulator_rows(scores, [&](int a, int r, const auto& for_scores) {
        const int2 rows = seen[a * 16 + r * 8];
        const int begin = rows.x - first_row, end = rows.y - first_row;
        for_scores([&](float& score, int row) {
            const bool hides = row < begin || row >= end;
            if (hides) score = -INFINITY;
        });
    });
}

// For scores in any order: for_all(rule) calls rule(score, row, col) for all scores.
template <class Tiles, class ForAll>
__device__ __forceinline__ void mask_edge_by_element(const Tiles& tiles, const ForAll& for_all) {
    for_all([&](float& score, int row, int col) {
        if (col >= tiles.length_k || col > row + tiles.shift + tiles.right || col < row + tiles.shift - tiles.left)
            score = -INFINITY;
    });
}

}  // namespace libflash::cuda
