// The template instances of the sm_90a backward kernel, for the plan and for the kernel. No CUDA header.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/config.h"

namespace libflash::cuda {

// What each instance supports.
//   plain        the host knows the lengths
//   ragged       like plain, with lengths on the device
//   block_mask   like ragged, with block masks
//   general      like block_mask, with softcap, ALiBi, bias, mask, dropout
enum class BackwardInstance { plain, ragged, block_mask, general };

constexpr const char* backward_kind_name(BackwardInstance kind) {
    switch (kind) {
        case BackwardInstance::plain: return "plain";
        case BackwardInstance::ragged: return "variable lengths";
        case BackwardInstance::block_mask: return "block mask";
        default: return "general";
    }
}

constexpr bool knows_block_mask(BackwardInstance kind) {
    return kind == BackwardInstance::block_mask || kind == BackwardInstance::general;
}

// Whether an instance can add to the dQ accumulator in a fixed order. For fp16 at head_dim 128 with a block mask there are not
// enough registers: the compiler would serialise the products.
constexpr bool has_fixed_order(const KernelConfig& config, BackwardInstance kind) {
    return kind != BackwardInstance::block_mask || config.dtype != KernelType::f16_ || config.head_dim != 128;
}

// Whether thread blocks can divide the query tiles or the query heads of a key tile (attention/params.h, SplitTilesParams).
// With a block mask the host does not know how many tiles there are, and at head_dim 128 there are not enough registers.
constexpr bool has_splits(BackwardInstance kind) { return kind != BackwardInstance::block_mask; }

constexpr BackwardInstance backward_instance(bool general, bool lengths_on_device, bool has_block_mask) {
    if (general) return BackwardInstance::general;
    if (has_block_mask) return BackwardInstance::block_mask;
    return lengths_on_device ? BackwardInstance::ragged : BackwardInstance::plain;
}

// With few units of kUnitRows rows, so many thread blocks share each of them in the first and in the last step.
constexpr int kStatisticsParts = 4;
constexpr int dq_conversion_parts(int tile_q) { return kUnitRows / tile_q; }

}  // namespace libflash::cuda
