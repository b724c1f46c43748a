// The template instances of decode, for the plan and the kernel. No CUDA header.
#pragma once

#include "cuda/attention/decode_params.h"
#include "cuda/attention/few_rows.h"
#include "cuda/config.h"

namespace libflash::cuda {

// The instances: which keys a warp works on, what the cache holds, and whether the attention kernel appends a new row.
//   shared_keys       more than 16 query rows share a key head: each warp has its own rows and works on all keys
//   own_keys          each warp works on the keys that it has loaded
//   own_keys_append   the same, and the kernel appends one new row and rotates the queries
//   two_heads         like own_keys, for two key heads per thread block
//   two_heads_append  the same, and the kernel appends and rotates
//   ..._of_codes      the cache holds codes of 8 bits; only for 16-bit queries. ..._append: the kernel also quantises the new
//                     row; for two heads only with few rows (can_append_codes())
//   ...few_rows...    codes, and at most 8 query rows share a key head
//   ..._scaled        the cache holds elements of the type of the queries, with scales
//   ragged...         rows of any lengths, positions, trees: a thread block works like own_keys or shared_keys
//   general...        like ragged..., with the rare options of the cache (host/problem_params.h), with scales or without
//   general_scaled    only for wide heads, with scales; `general` is then the instance without scales
//   ..._after_prefix  the sums over keys that sequences share are in the workspace (decode_prefix.cuh)
//   invariant         invariant rows over a cache of the type of the queries (decode_invariant.cuh). With other options the
//                     general instance computes invariant rows
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
    general_of_codes,
    own_keys_after_prefix,
    two_heads_after_prefix,
    own_keys_of_codes_append,
    invariant,
    few_rows,
    few_rows_append,
    two_heads_few_rows,
    two_heads_few_rows_append,
    general_scaled
};

constexpr DecodeKind decode_kind(bool shares_keys, int key_heads, bool appends_inside,
                                 DecodeStorage storage = DecodeStorage::plain, bool few_rows = false) {
    const bool codes = storage == DecodeStorage::codes;
    if (codes && few_rows) {
        if (key_heads == 2) return appends_inside ? DecodeKind::two_heads_few_rows_append : DecodeKind::two_heads_few_rows;
        return appends_inside ? DecodeKind::few_rows_append : DecodeKind::few_rows;
    }
    if (storage != DecodeStorage::plain) {
        if (shares_keys) return codes ? DecodeKind::shared_keys_of_codes : DecodeKind::shared_keys_scaled;
        if (codes && appends_inside) return DecodeKind::own_keys_of_codes_append;
        if (key_heads == 2) return codes ? DecodeKind::two_heads_of_codes : DecodeKind::two_heads_scaled;
        return codes ? DecodeKind::own_keys_of_codes : DecodeKind::own_keys_scaled;
    }
    if (shares_keys) return DecodeKind::shared_keys;
    if (key_heads == 2) return appends_inside ? DecodeKind::two_heads_append : DecodeKind::two_heads;
    return appends_inside ? DecodeKind::own_keys_append : DecodeKind::own_keys;
}

// `general`: the problem has rare options.
constexpr DecodeKind ragged_decode_kind(DecodeStorage storage, bool general, bool wide) {
    const bool codes = storage == DecodeStorage::codes;
    if (wide && storage == DecodeStorage::scaled) return DecodeKind::general_scaled;
    if (general) return codes ? DecodeKind::general_of_codes : DecodeKind::general;
    return codes ? DecodeKind::ragged_of_codes : DecodeKind::ragged;
}

// Whether the instance for codes and `rows` query rows per key head can append.
constexpr bool can_append_codes(int key_heads, int64_t rows) { return key_heads == 1 || are_few_rows(rows); }

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
        case DecodeKind::general_scaled: return "scales, general";
        case DecodeKind::own_keys_of_codes_append: return "8-bit codes, each warp its own keys, appends";
        case DecodeKind::own_keys_after_prefix: return "each warp its own keys, after shared ones";
        case DecodeKind::two_heads_after_prefix: return "two key heads, after shared keys";
        case DecodeKind::invariant: return "invariant rows";
        case DecodeKind::few_rows: return "8-bit codes, few rows, each warp its own keys";
        case DecodeKind::few_rows_append: return "8-bit codes, few rows, each warp its own keys, appends";
        case DecodeKind::two_heads_few_rows: return "8-bit codes, few rows, two key heads";
        case DecodeKind::two_heads_few_rows_append: return "8-bit codes, few rows, two key heads, appends";
        default: return "8-bit codes, general";
    }
}

// Whether there are instances for keys that sequences share: only for 16-bit types, and if all sums of a warp fit into registers.
constexpr bool has_prefix_kernels(int head_dim, int element_bytes) { return head_dim <= 128 && element_bytes == 2; }
constexpr int kPrefixWarps = 4, kPrefixRows = kPrefixWarps * kDecodeSlab;  // of a thread block of the kernel for shared keys

}  // namespace libflash::cuda
