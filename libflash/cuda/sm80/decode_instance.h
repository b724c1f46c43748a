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
//   ..._scaled        the cache holds elements of the type of the queries, with scales
//   ragged...         rows of any lengths, positions, trees: a thread block works like own_keys or shared_keys
//   general...        the same for rare options of the cache (host/problem_params.h), with scales or without
enum class DecodeKind {
    shared_keys,
    own_keys,
    own_keys_append,
    two_heads,
    two_heads_append,
    shared_keys_of_codes,
    own_keys_of_codes,
    two_heads_of_codes,
    ragged,
    shared_keys_scaled,
    own_keys_scaled,
    two_heads_scaled,
    ragged_of_codes,
    general,
    general_of_codes
};

constexpr DecodeKind decode_kind(bool shares_keys, int key_heads, bool appends_inside,
                                 DecodeStorage storage = DecodeStorage::plain) {
    const bool codes = storage == DecodeStorage::codes;
    if (storage != DecodeStorage::plain) {
        if (shares_keys) return codes ? DecodeKind::shared_keys_of_codes : DecodeKind::shared_keys_scaled;
        if (key_heads == 2) return codes ? DecodeKind::two_heads_of_codes : DecodeKind::two_heads_scaled;
        return codes ? DecodeKind::own_keys_of_codes : DecodeKind::own_keys_scaled;
    }
    if (shares_keys) return DecodeKind::shared_keys;
    if (key_heads == 2) return appends_inside ? DecodeKind::two_heads_append : DecodeKind::two_heads;
    return appends_inside ? DecodeKind::own_keys_append : DecodeKind::own_keys;
}

// `general`: has rare options.
constexpr DecodeKind ragged_decode_kind(bool codes, bool general) {
    if (general) return codes ? DecodeKind::general_of_codes : DecodeKind::general;
    return codes ? DecodeKind::ragged_of_codes : DecodeKind::ragged;
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
        case DecodeKind::two_heads_of_codes: return "8-bit codes, two key heads";
        case DecodeKind::ragged: return "rows of any lengths";
        case DecodeKind::shared_keys_scaled: return "scales, warps share keys";
        case DecodeKind::own_keys_scaled: return "scales, each warp its own keys";
        case DecodeKind::two_heads_scaled: return "scales, two key heads";
        case DecodeKind::ragged_of_codes: return "8-bit codes, rows of any lengths";
        case DecodeKind::general: return "general";
        default: return "8-bit codes, general";
    }
}

}  // namespace libflash::cuda
