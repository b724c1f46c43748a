// The template instances of decode, for the plan and the kernel. No CUDA header.
#pragma once

#include "cuda/attention/decode_params.h"

namespace libflash::cuda {

// Which keys a warp works on, and whether the attention kernel appends a new row.
//   shared_keys       more than 16 query rows share a key head: each warp has its own rows and works on all keys
//   own_keys          each warp works on the keys that it has loaded
//   own_keys_append   the same, and the kernel appends one new row and rotates the queries
//   two_heads         like own_keys, for two key heads per thread block
//   two_heads_append  the same, and the kernel appends and rotates
//   ..._of_codes      the cache holds codes of 8 bits; kernels of 16-bit types only
//   ragged            rows of any lengths, positions, trees: a thread block works like own_keys or shared_keys
enum class DecodeKind {
    shared_keys,
    own_keys,
    own_keys_append,
    two_heads,
    two_heads_append,
    shared_keys_of_codes,
    own_keys_of_codes,
    two_heads_of_codes,
    ragged
};

constexpr DecodeKind decode_kind(bool shares_keys, int key_heads, bool appends_inside, bool codes = false) {
    if (codes && shares_keys) return DecodeKind::shared_keys_of_codes;
    if (codes) return key_heads == 2 ? DecodeKind::two_heads_of_codes : DecodeKind::own_keys_of_codes;
    if (shares_keys) return DecodeKind::shared_keys;
    if (key_heads == 2) return appends_inside ? DecodeKind::two_heads_append : DecodeKind::two_heads;
    return appends_inside ? DecodeKind::own_keys_append : DecodeKind::own_keys;
}

constexpr const char* decode_kind_name(DecodeKind kind) {
    switch (kind) {
        case DecodeKind::shared_keys: return "warps share keys";
        case DecodeKind::own_keys: return "each warp its own keys";
        case DecodeKind::own_keys_append: return "each warp its own keys, appends";
        case DecodeKind::two_heads: return "two key heads";
        case DecodeKind::two_heads_append: return "two key heads, appends";
        case DecodeKind::shared_keys_of_codes: return "8-bit codes, warps share keys";
        case DecodeKind::own_keys_of_codes: return "8-bit codes, each warp its own keys";
        case DecodeKind::ragged: return "rows of any lengths";
        default: return "8-bit codes, two key heads";
    }
}

constexpr int kAppendThreads = 128;  // threads per block of the append kernel: one per channel pair of a row of 256 channels

}  // namespace libflash::cuda
