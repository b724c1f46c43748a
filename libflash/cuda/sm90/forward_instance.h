// The template instances of the sm_90a forward kernel and their tiles, for the plan and for the kernel. No CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/invariant_segments.h"
#include "cuda/attention/long_sums.h"
#include "cuda/config.h"

namespace libflash::cuda {

// What each instance supports.
//   plain       no rare options; the host knows the lengths
//   narrow      like plain, with fewer rows in a query tile
//   dynamic     like plain, with lengths on the device: dynamic tile scheduler (sm90/sequence_order.cuh)
//   block_mask  like dynamic, with block masks and long sums
//   general     like block_mask, with softcap, ALiBi, bias, mask, dropout, and scales that are not positive
//   cache       like dynamic, with keys and values in a cache (prefill.cuh)
//   invariant   like cache, for invariant rows: the bits of sm80/decode_invariant.cuh
//   codes       like cache, for 8-bit codes that TMA loads
//   copied      like cache, for other caches that TMA cannot load as they are: scales, pages of any size
// With statistics of rows (forward_statistics.cuh):
//   statistics  like block_mask
//   maxima      like plain, without the entropy
//   entropy     like plain
enum class ForwardInstance {
    plain,
    dynamic,
    block_mask,
    general,
    cache,
    invariant,
    statistics,
    maxima,
    entropy,
    narrow,
    copied,
    codes,
};

constexpr const char* forward_kind_name(ForwardInstance kind) {
    switch (kind) {
        case ForwardInstance::plain: return "plain";
        case ForwardInstance::dynamic: return "variable lengths";
        case ForwardInstance::block_mask: return "block mask";
        case ForwardInstance::cache: return "cache";
        case ForwardInstance::invariant: return "cache, invariant rows";
        case ForwardInstance::statistics: return "statistics";
        case ForwardInstance::maxima: return "plain, largest scores";
        case ForwardInstance::entropy: return "plain, entropy";
        case ForwardInstance::narrow: return "plain, narrow";
        case ForwardInstance::copied: return "cache, copied";
        case ForwardInstance::codes: return "cache, codes";
        default: return "general";
    }
}

// Whether the instance has neither a dynamic schedule nor block masks. Its main loop has the least code.
constexpr bool is_plain(ForwardInstance kind) {
    return kind == ForwardInstance::plain || kind == ForwardInstance::maxima || kind == ForwardInstance::entropy ||
           kind == ForwardInstance::narrow;
}

// Whether the kernel has instances for long sums (attention/long_sums.h). With 192 channels the compiler would spill, with 256
// only in the kernels with statistics of rows. Not every instance has long sums, because their code makes an instance slower.
constexpr bool forward_has_long_sums(const KernelConfig& config) {
    return has_long_sums(config) && config.head_dim_v != 192 && !(config.statistics && config.head_dim_v == 256);
}
constexpr bool forward_has_long_sums(const KernelConfig& config, ForwardInstance kind) {
    return forward_has_long_sums(config) && !is_plain(kind) && kind != ForwardInstance::dynamic &&
           kind != ForwardInstance::invariant;
}

// Kernels without a dynamic instance use block_mask instead. The tiles of block_mask are those of the plain instance, except for
// head dims 96 and 192.
constexpr bool has_dynamic_instance(const KernelConfig& config) { return config.tile_q > 128 && config.tile_k == 128; }

// With few rows, query tiles of 128 rows occupy more multiprocessors than those of 192.
constexpr bool has_narrow_instance(const KernelConfig& config) {
    return !config.statistics && config.tile_q > 128 && config.head_dim <= 64;
}

// `block_mask`: whether there is a block mask, or more keys than accumulators can add up.
constexpr ForwardInstance forward_instance(const KernelConfig& config, bool general, bool dynamic, bool block_mask) {
    if (general) return ForwardInstance::general;
    if (block_mask) return ForwardInstance::block_mask;
    if (!dynamic) return ForwardInstance::plain;
    return has_dynamic_instance(config) ? ForwardInstance::dynamic : ForwardInstance::block_mask;
}

// The instance of a kernel with statistics of rows.
constexpr ForwardInstance forward_statistics_instance(bool dynamic, bool entropy) {
    if (dynamic) return ForwardInstance::statistics;
    return entropy ? ForwardInstance::entropy : ForwardInstance::maxima;
}

// With a block mask, a query tile must lie within one row of blocks.
constexpr int forward_tile_q(const KernelConfig& config, ForwardInstance kind) {
    switch (kind) {
        case ForwardInstance::narrow:
        case ForwardInstance::general:
        case ForwardInstance::block_mask:
        case ForwardInstance::invariant:
        case ForwardInstance::statistics: return 128;
        default: return config.tile_q;
    }
}

// Units (attention/invariant_softmax.cuh) in a key tile of invariant rows. Segments begin at multiples of a key tile.
constexpr int kInvariantUnits = 2;

// The rare options need more registers: with 192 channels their key tiles are smaller. The sums of the entropy, too, need more
// registers where query tiles have 192 rows. With a block mask, a key tile must lie within one block.
constexpr int forward_tile_k(const KernelConfig& config, ForwardInstance kind) {
    if (kind == ForwardInstance::general) return config.head_dim <= 128 ? 128 : 64;
    if (kind == ForwardInstance::invariant) return kInvariantUnits * kInvariantUnit;
    if (kind == ForwardInstance::block_mask || kind == ForwardInstance::statistics)
        return config.head_dim <= 128 || config.tile_k >= 128 ? 128 : 64;
    if (kind == ForwardInstance::entropy && config.tile_q > 128) return 96;
    return config.tile_k;
}

// Invariant rows have two accumulators: for the current segment, and for the segments before it.
constexpr bool has_invariant_prefill(const KernelConfig& config) { return config.head_dim_v <= 128; }

// Keys of the smallest TMA box over a cache. Keys of pages that are no multiple of it are copied (forward_copy_warpgroup.cuh).
constexpr int kCachedUnit = 16;

// Whether thread blocks of prefill can work in pairs (block_pair.cuh). Three consumer warpgroups have too few registers for it.
constexpr bool prefill_has_pairs(const KernelConfig& config) { return config.tile_q <= 128; }

// Whether the prefill kernel has the instances `copied` and `codes`, in which a further warpgroup loads keys and values or
// converts codes. With three consumer warpgroups there are too few registers; the further warpgroup has a lane for each key, so a
// tile has 128 keys.
constexpr bool has_copied_prefill(const KernelConfig& config) {
    return config.tile_q <= 128 && config.tile_k == 128 && config.head_dim == config.head_dim_v;
}

// Size of the workspace of sm90/sequence_order.cuh, and of a schedule, which has no counters.
inline size_t sequence_order_bytes(int64_t units) { return sizeof(int32_t) * static_cast<size_t>(4 + 5 * units); }
inline size_t schedule_bytes(int64_t units) { return sizeof(int32_t) * static_cast<size_t>(4 + 4 * units); }

}  // namespace libflash::cuda
