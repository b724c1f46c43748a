// The template instances of forward for sm_90a, and their tiles: the plan and the kernel both read them here. No CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/config.h"

namespace libflash::cuda {

// What an instance can do.
//   plain    no rare option, and lengths that the host knows
//   unequal  lengths on the device: thread blocks take tiles as they become free (sm90/sequence_order.cuh)
//   blocks   the same, and a block mask
//   general  all of it, and softcap, ALiBi, bias, mask, dropout, and scales that are not positive
enum class ForwardInstance { plain, dynamic, block_mask, general };

constexpr const char* forward_kind_name(ForwardInstance kind) {
    switch (kind) {
        case ForwardInstance::plain: return "plain";
        case ForwardInstance::dynamic: return "variable lengths";
        case ForwardInstance::block_mask: return "block mask";
        default: return "general";
    }
}

// Where there is no instance for variable lengths, the one for block masks serves. It has the plain tiles but with 96 and 192
// channels.
constexpr bool has_dynamic_instance(const KernelConfig& config) { return config.tile_q > 128 && config.tile_k == 128; }

constexpr ForwardInstance forward_instance(const KernelConfig& config, bool general, bool dynamic, bool has_block_mask) {
    if (general) return ForwardInstance::general;
    if (!dynamic) return ForwardInstance::plain;
    return has_block_mask || !has_dynamic_instance(config) ? ForwardInstance::block_mask : ForwardInstance::dynamic;
}

// A tile of more than 128 query rows would lie in two rows of blocks and need the keys of both.
constexpr int forward_tile_q(const KernelConfig& config, ForwardInstance kind) {
    return kind == ForwardInstance::block_mask || kind == ForwardInstance::general ? 128 : config.tile_q;
}

// The rare options need registers of their own. With a block mask a tile of keys must not lie in two blocks.
constexpr int forward_tile_k(const KernelConfig& config, ForwardInstance kind) {
    if (kind == ForwardInstance::general) return config.head_dim <= 64 ? 128 : (config.head_dim_v <= 192 ? 64 : 32);
    if (kind == ForwardInstance::block_mask) return config.head_dim <= 128 || config.tile_k >= 128 ? 128 : 64;
    return config.tile_k;
}

// The workspace of sm90/sequence_order.cuh.
inline size_t sequence_order_bytes(int64_t batch, int64_t units) {
    return sizeof(int32_t) * static_cast<size_t>(3 + 2 * batch + units);
}

}  // namespace libflash::cuda
