// Which instance of forward for sm_90a a problem takes, and the rows of its tiles of queries: the launcher and whoever counts tiles ask here. No CUDA header.
#pragma once

#include "cuda/config.h"

namespace libflash::cuda {

// What an instance knows. plain: nothing rare. unequal: items that take nobody knows how long, because lengths are on the device; they are given out as thread
// blocks come free (sm90/work_order.cuh). blocks: that, and blocks that are left out. general: all of it, softcap, ALiBi, bias, mask, dropout, and scales that
// are not positive.
enum class ForwardKind { plain, unequal, blocks, general };

// Else `blocks` serves for `unequal` too: it has the plain tiles, or, with 96 and 192 channels, others, which saves an instance.
constexpr bool has_unequal_kind(const KernelConfig& config) { return config.tile_q > 128 && config.tile_k == 128; }

constexpr ForwardKind forward_kind(const KernelConfig& config, bool general, bool given_out, bool leaves_out_blocks) {
    if (general) return ForwardKind::general;
    if (!given_out) return ForwardKind::plain;
    return leaves_out_blocks || !has_unequal_kind(config) ? ForwardKind::blocks : ForwardKind::unequal;
}

// Where blocks of 128 x 128 are left out, a tile of more rows would lie in two rows of blocks and have the keys of both.
constexpr int forward_tile_q(const KernelConfig& config, ForwardKind kind) {
    return kind == ForwardKind::blocks || kind == ForwardKind::general ? 128 : config.tile_q;
}

}  // namespace libflash::cuda
