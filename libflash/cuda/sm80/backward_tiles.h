// The tiles of the backward kernels for sm_80 and later, and how much shared memory a thread block of them takes: the plan and
// the kernels both read them here. No CUDA header.
#pragma once

namespace libflash::cuda {

// Warps that share 32 keys: each has 64 channels at most of their two gradients.
constexpr int backward_split(int head_dim) { return head_dim <= 64 ? 1 : (head_dim <= 128 ? 2 : 4); }

// Score tiles: with two of them, and three stages of Q and dO, one barrier a step is enough.
constexpr int backward_buffers(int stages) { return stages >= 3 ? 2 : 1; }

// Rows of queries of a thread block of query_rows.cuh, which fits every GPU. The rare options need registers of their own; floats
// take twice the room. `element`: bytes of one.
constexpr int backward_query_tile(int head_dim, bool general, int element) {
    if (element == 4) return head_dim <= 128 ? 64 : 32;
    return head_dim <= 128 && !general ? 128 : 64;
}

// Keys at a time of that kernel.
constexpr int query_rows_tile_k(int head_dim, int element) {
    if (element == 4) return head_dim <= 192 ? 32 : 16;
    return head_dim <= 128 ? 64 : 32;
}

constexpr int kBackwardCommonBytes = 128;

// Warps that split a head share P and dS; floats have room for one of the two at a time.
constexpr int backward_score_tiles(int head_dim, int element) { return backward_split(head_dim) > 1 && element == 2 ? 2 : 1; }

constexpr int backward_shared_bytes(int head_dim, int tile_q, int tile_k, int stages, int element) {
    const int keys = 2 * tile_k * head_dim * element;                // K and V
    const int stage = 2 * tile_q * head_dim * element + tile_q * 8;  // Q, dO, and two numbers a row
    const int scores = tile_q * tile_k * element * backward_score_tiles(head_dim, element);
    return keys + stages * stage + backward_buffers(stages) * scores + kBackwardCommonBytes;
}

}  // namespace libflash::cuda
