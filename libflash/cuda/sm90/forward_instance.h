// The template instances of forward for sm_90a, and their tiles: the plan and the kernel both read them here. No CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/config.h"

namespace libflash::cuda {

// What an instance can do.
//   plain    no rare option, and lengths that the host knows
//   unequal  lengths on the device: thread blocks take tiles as they become free (sm90/work_order.cuh)
//   blocks   the same, and a block mask
//   general  all of it, and softcap, ALiBi, bias, mask, dropout, and scales that are not positive
enum class ForwardKind { plain, unequal, blocks, general };

constexpr const char* forward_kind_name(ForwardKind kind) {
    switch (kind) {
        case ForwardKind::plain: return "plain";
        case ForwardKind::unequal: return "variable lengths";
        case ForwardKind::blocks: return "block mask";
        default: return "general";
    }
}

// Where there is no instance for variable lengths, the one for block masks serves. It has the plain tiles but with 96 and 192
// channels.
constexpr bool has_unequal_kind(const KernelConfig& config) { return config.tile_q > 128 && config.tile_k == 128; }

constexpr ForwardKind forward_kind(const KernelConfig& config, bool general, bool dynamic, bool has_block_mask) {
    if (general) return ForwardKind::general;
    if (!dynamic) return ForwardKind::plain;
    return has_block_mask || !has_unequal_kind(config) ? ForwardKind::blocks : ForwardKind::unequal;
}

// A tile of more than 128 query rows would lie in two rows of blocks and need the keys of both.
constexpr int forward_tile_q(const KernelConfig& config, ForwardKind kind) {
    return kind == ForwardKind::blocks || kind == ForwardKind::general ? 128 : config.tile_q;
}

// The rare options need registers of their own. With a block mask a tile of keys must not lie in two blocks.
constexpr int forward_tile_k(const KernelConfig& config, ForwardKind kind) {
    if (kind == ForwardKind::general) return config.head_dim <= 64 ? 128 : (config.head_dim_v <= 192 ? 64 : 32);
    if (kind == ForwardKind::blocks) return config.head_dim <= 128 || config.tile_k >= 128 ? 128 : 64;
    return config.tile_k;
}

// The workspace of sm90/work_order.cuh.
inline size_t work_order_bytes(int64_t batch, int64_t units) {
    return sizeof(int32_t) * static_cast<size_t>(3 + 2 * batch + units);
}

}  // namespace libflash::cuda
