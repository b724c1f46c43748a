// Tiles of query_rows.cuh, for the plan and the kernels. No CUDA header.
#pragma once

namespace libflash::cuda {

// Query rows per thread block; the tile fits on every GPU. It is smaller with rare options, which need registers, and with
// float32, which needs twice the shared memory. Float64 has separate kernels (sm80/dq_f64.cuh). `element`: bytes per element.
constexpr int query_rows_tile_q(int head_dim, bool general, int element) {
    if (head_dim > 256) return 64 / element;
    if (element == 8) return 16;
    if (element == 4) return head_dim <= 128 ? 64 : 32;
    return head_dim <= 128 && !general ? 128 : 64;
}

// Keys per tile.
constexpr int query_rows_tile_k(int head_dim, int element) {
    if (head_dim > 256) return element == 8 ? 8 : 16;
    if (element == 8) return head_dim <= 128 ? 16 : 8;
    if (element == 4) return head_dim <= 192 ? 32 : 16;
    return head_dim <= 128 ? 64 : 32;
}

}  // namespace libflash::cuda
