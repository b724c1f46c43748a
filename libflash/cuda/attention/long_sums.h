// Long sums: the accumulators of the tensor cores truncate, so the error of a sum grows with the number of its terms, and after
// some ten thousand keys it reaches the last place of `half`. Row sums, and the sums of float32 kernels, are rounded to nearest;
// but equal terms are rounded in the same direction, so the errors of these sums are as large. Therefore kernels add their
// accumulators of P V and their row sums to float32 sums in the workspace after every kKeysPerSum keys, and continue with zeros
// (long_sums.cuh; sm90 only if there are more than most_keys_of_accumulators()). This header contains what plan and kernel must
// agree on. No CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/config.h"

// The tests that run kernels on the host define fewer keys.
#ifndef LIBFLASH_KEYS_PER_SUM
#define LIBFLASH_KEYS_PER_SUM 32768
#endif

namespace libflash::cuda {

constexpr int kKeysPerSum = LIBFLASH_KEYS_PER_SUM;

// The float32 forward kernel with 256 channels has no registers for long sums. float64 needs none: its sums are accurate enough,
// and rounded to nearest.
constexpr bool has_long_sums(const KernelConfig& config) {
    if (config.dtype == KernelType::f64_) return false;
    return config.operation != Operation::forward || config.dtype != KernelType::f32_ || config.head_dim != 256;
}

// The number of keys for which the accumulators of the tensor cores suffice. bf16 has three bits fewer than `half`: with four
// times as many keys the error is a tenth of its last place.
constexpr int64_t most_keys_of_accumulators(const KernelConfig& config) {
    if (config.dtype == KernelType::f64_) return INT64_MAX;
    return int64_t{kKeysPerSum} * (config.dtype == KernelType::bf16_ ? 4 : 1);
}

// The number of rows for dK and dV, which are sums over the query rows of all heads that share a key head. With more rows,
// backward launches its dK/dV kernel several times, and adds the results in float32 (gradient_sums.cuh). The float32 kernels have
// no registers for this; the float64 kernels do not need it.
constexpr int64_t most_rows_of_accumulators(const KernelConfig& config) {
    return element_bytes(config.dtype) > 2 ? INT64_MAX : most_keys_of_accumulators(config);
}

// Whether sums over this many keys need the workspace.
constexpr bool needs_long_sums(const KernelConfig& config, int64_t keys) { return has_long_sums(config) && keys > kKeysPerSum; }

// Key tiles whose sum stays in the accumulators: a power of two.
constexpr int tiles_per_sum(int tile_k) {
    int tiles = 1;
    while (2 * tiles * tile_k <= kKeysPerSum) tiles *= 2;
    return tiles;
}

// Workspace of a thread block with dK and dV of tile_k keys.
constexpr size_t gradient_sums_bytes(int tile_k, int head_dim) {
    return sizeof(float) * 2 * static_cast<size_t>(tile_k) * static_cast<size_t>(head_dim);
}

// Counters of a split key tile (SplitTilesParams): for dK and dV, one for each warp, which has 16 keys.
constexpr int64_t split_counters(int tile_k) { return 2 * (tile_k / 16); }

// Workspace of a thread block with tile_q query rows whose accumulators have `channels` columns. Up to two warps share a row, and
// each has some state in addition to its sums.
constexpr size_t long_sums_bytes(int tile_q, int channels) {
    return sizeof(float) * static_cast<size_t>(tile_q) * static_cast<size_t>(channels + 32);
}

}  // namespace libflash::cuda
