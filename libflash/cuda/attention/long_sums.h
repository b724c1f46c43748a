// Long sums: the accumulators of the tensor cores truncate, so the error of a sum in them grows with the number of its terms, and
// after some ten thousand keys it reaches the last place of `half`. Kernels of `half` therefore add their accumulators of P V to
// float32 sums in the workspace after every kKeysPerSum keys and go on with zeros (long_sums.cuh). bf16 has three bits fewer.
// This header has what plan and kernel agree on. No CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/config.h"

// The tests that run kernels on the host choose fewer keys.
#ifndef LIBFLASH_KEYS_PER_SUM
#define LIBFLASH_KEYS_PER_SUM 32768
#endif

namespace libflash::cuda {

constexpr int kKeysPerSum = LIBFLASH_KEYS_PER_SUM;

constexpr bool has_long_sums(const KernelConfig& config) { return config.dtype == KernelType::f16_; }

// Whether sums over this many keys need memory.
constexpr bool needs_long_sums(const KernelConfig& config, int64_t keys) { return has_long_sums(config) && keys > kKeysPerSum; }

// Key tiles that are added in the accumulators: a power of two.
constexpr int tiles_per_sum(int tile_k) {
    int tiles = 1;
    while (2 * tiles * tile_k <= kKeysPerSum) tiles *= 2;
    return tiles;
}

// Workspace of a thread block with tile_q query rows whose accumulators have `channels` columns. Up to two warps share a row, and
// each keeps some more numbers with its sums.
constexpr size_t long_sums_bytes(int tile_q, int channels) {
    return sizeof(float) * static_cast<size_t>(tile_q) * static_cast<size_t>(channels + 32);
}

}  // namespace libflash::cuda
