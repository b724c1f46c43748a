// How much shared memory a thread block of a backward row takes: the kernels lay it out so, and the choice of a kernel asks before
// there is a launch. No CUDA header.
#pragma once

namespace libflash::cuda {

// Warps that share 32 keys: each has 64 channels at most of their two gradients.
constexpr int backward_split(int head_dim) { return head_dim <= 64 ? 1 : (head_dim <= 128 ? 2 : 4); }

// Score tiles: with two of them, and three stages of Q and dO, one barrier a step is enough.
constexpr int backward_buffers(int stages) { return stages >= 3 ? 2 : 1; }

// Rows of queries of a thread block of query_rows.cuh, which fits every GPU. The rare options need registers of their own.
constexpr int backward_query_tile(int head_dim, bool general) { return head_dim <= 128 && !general ? 128 : 64; }

constexpr int kBackwardCommonBytes = 128;

constexpr int backward_shared_bytes(int head_dim, int tile_q, int tile_k, int stages) {
    const int keys = 2 * tile_k * head_dim * 2;                // K and V
    const int stage = 2 * tile_q * head_dim * 2 + tile_q * 8;  // Q, dO, and two numbers a row
    const int scores = tile_q * tile_k * 2 * (backward_split(head_dim) > 1 ? 2 : 1);
    return keys + stages * stage + backward_buffers(stages) * scores + kBackwardCommonBytes;
}

}  // namespace libflash::cuda
