// Tiles and shared memory size of the backward kernels for sm_80 and later, for the plan and the kernels. No CUDA header.
#pragma once

namespace libflash::cuda {

// How many warps share 32 keys: each holds at most 64 channels of dK and dV.
constexpr int backward_split(int head_dim) { return head_dim <= 64 ? 1 : (head_dim <= 128 ? 2 : 4); }

// The number of buffers for dS (and P). With two buffers and three stages of Q and dO one barrier per query tile is enough.
constexpr int backward_buffers(int stages) { return stages >= 3 ? 2 : 1; }

constexpr int kBackwardCommonBytes = 128;

// Score tiles per buffer. Where several warps share keys (backward_split() > 1), P and dS go through shared memory, else only dS.
// Float32 has space for only one of the two at a time.
constexpr int backward_score_tiles(int head_dim, int element) { return backward_split(head_dim) > 1 && element == 2 ? 2 : 1; }

constexpr int backward_shared_bytes(int head_dim, int tile_q, int tile_k, int stages, int element) {
    const int keys = 2 * tile_k * head_dim * element;                // K and V
    const int stage = 2 * tile_q * head_dim * element + tile_q * 8;  // Q, dO, softmax statistics
    const int scores = tile_q * tile_k * element * backward_score_tiles(head_dim, element);
    return keys + stages * stage + backward_buffers(stages) * scores + kBackwardCommonBytes;
}

// Wide heads (backward_wide.cuh): a thread block has tile_rows rows of one side (queries or keys) and processes wide_columns()
// rows of the other side at a time. wide_parts() warps share 16 rows. wide_column_tiles(): tiles of the other side in shared
// memory. In float32 its two tensors are loaded one after the other into one tile, and warps exchange parts of the scores through
// separate memory (wide_part_bytes()). `element`: bytes of an element.
constexpr bool is_wide_backward(int head_dim) { return head_dim > 256; }
constexpr int wide_columns(int tile_rows, int element) { return element == 2 ? tile_rows / 2 : tile_rows; }
// Whether the kernel also computes dbias.
constexpr bool has_wide_dbias(int head_dim, int element) { return is_wide_backward(head_dim) && element == 4; }
constexpr int wide_parts(int element) { return element == 4 ? 4 : 2; }
constexpr int wide_column_tiles(int element) { return element == 4 ? 1 : 2; }
// One 16-byte vector per thread.
constexpr int wide_part_bytes(int tile_rows, int element) {
    return element == 4 ? tile_rows / 16 * wide_parts(element) * 32 * 16 : 0;
}
constexpr int kWideCommonBytes = 256, kWideShardBytes = 80;  // the latter and 8 bytes per row: ShardTile
constexpr int wide_backward_shared_bytes(int head_dim, int tile_rows, int element) {
    const int rows = 2 * tile_rows + wide_column_tiles(element) * wide_columns(tile_rows, element);
    return rows * head_dim * element + tile_rows * 16 + kWideCommonBytes + kWideShardBytes + wide_part_bytes(tile_rows, element);
}

}  // namespace libflash::cuda
