// DecodeProblem: a decode call in checked form, a few query rows per sequence over a cache of keys and values.
#pragma once

#include <cstdint>

#include "problem/attention.h"
#include "problem/cache_scale.h"
#include "problem/cache_shard.h"

namespace libflash {

// The largest head_dim and head_dim_v of decode on the CPU.
constexpr int64_t kMostDecodeChannels = 576;

// Where key j of sequence b is stored: row j of its cache entry or, with a block table, a row of one of its pages.
struct KvCache {
    TensorView k, v;                         // (entries or pages, capacity or page size, heads, channels)
    TensorView k_rope;                       // optional: the last channels of the keys, in the type of q
    DType dtype = DType::none;               // of k and v
    CacheScale k_scale, v_scale;             // of k and v
    bool v_in_k = false;                     // v is a view of k: an append writes k alone
    int64_t capacity = 0;                    // largest number of keys of a sequence
    const int32_t* batch_idx = nullptr;      // contiguous: cache entry of each sequence; nullptr: entry b for sequence b
    const int32_t* block_table = nullptr;    // paged
    int64_t block_table_stride[2] = {0, 0};  // (sequence, column), in elements
    int64_t page_size = 0;                   // 0: contiguous
    int64_t pages = 0;

    bool paged() const { return page_size > 0; }
    int64_t rope_dim() const { return k_rope.present ? k_rope.shape[3] : 0; }
};

// Bit n % 32 of word n / 32 of a row: the query row sees the n-th of the last Lq keys of its sequence. `data` is nullptr without
// tree_mask.
struct TreeMask {
    const int32_t* data = nullptr;
    int64_t stride[2] = {0, 0};  // (row, word), in elements
    int64_t words = 0;
    Sequences rows;  // a sequence has as many rows as query rows, or none: then it is causal
};

// A hint: sequences groups[i] to groups[i + 1] - 1 have the same first lens[i] keys in the same rows of the cache. `groups` is
// nullptr without the hint.
struct SharedKeys {
    const int32_t *groups = nullptr, *lens = nullptr;  // count + 1 and count numbers
    int64_t count = 0;
};

struct DecodeProblem : ScoreOptions {
    Device device;
    DType dtype = DType::none;
    int64_t batch = 0;
    Sequences q_rows;    // packed with cu_seqlens_q
    Sequences new_rows;  // of k_new and v_new: no rows without them
    // Query rows and new rows. Dense: of each sequence. Packed: of the whole tensor, so an upper bound for each sequence.
    int64_t seqlen_q = 0, seqlen_new = 0;
    int64_t heads_q = 0, heads_k = 0;
    int64_t head_dim = 0, head_dim_v = 0;

    TensorView q, out, lse;  // lse may be absent
    KvCache cache;
    CacheShard shard;                        // the part of the keys in this cache; lengths and positions count all keys
    const int32_t* cache_seqlens = nullptr;  // valid keys before the call; nullptr: default_seqlen
    int64_t default_seqlen = 0;
    const int32_t* leftpad = nullptr;  // optional: how many keys at the start of each sequence do not exist

    TensorView k_new, v_new, k_rope_new;  // absent: nothing is appended
    const int32_t* positions = nullptr;   // q_positions: position of each query row; nullptr: rows follow the cached keys
    TreeMask tree;
    SharedKeys shared;
    TensorView schedule;  // optional: read, or written by the call
    bool writes_schedule = false;
    bool invariant_rows = false;
    bool causal = false;
    MaskRule window;  // mask_rule without the causal rule

    TensorView rotary_cos, rotary_sin;
    bool rotary_interleaved = false;

    Request request;

    int64_t group_size() const { return heads_k ? heads_q / heads_k : 0; }
    bool packed() const { return q_rows.packed() || new_rows.packed(); }
    // Rows of all sequences; packed: all rows of the tensor, also rows after the last sequence.
    int64_t query_rows() const { return q_rows.packed() ? seqlen_q : batch * seqlen_q; }
    int64_t appended_rows() const { return new_rows.packed() ? seqlen_new : batch * seqlen_new; }

    // Whether query rows without given positions have consecutive positions in the rotary embedding; else all have the first one.
    bool rows_advance() const { return mask_rule.bounded() || tree.data; }

    // The functions below read the arrays, so they are for host tensors only.
    int64_t cached(int64_t b) const { return cache_seqlens ? cache_seqlens[b] : default_seqlen; }
    // Keys of a sequence, with the new keys of this call.
    int64_t length_k(int64_t b) const { return cached(b) + new_rows.length(b); }
    // How many of these keys this cache has.
    int64_t rows_k(int64_t b) const { return shard.row_of(length_k(b)); }
    // Column of the diagonal of the mask rule and of ALiBi in row 0.
    int64_t shift(int64_t b) const { return length_k(b) - q_rows.length(b); }
    // Positions of query row `row` and of new key `n` in the rotary embedding.
    int64_t rotary_position(int64_t b, int64_t row) const {
        return positions ? positions[q_rows.before(b) + row] : cached(b) + (rows_advance() ? row : 0);
    }
    int64_t new_key_position(int64_t b, int64_t n) const {
        const int64_t key = cached(b) + n;
        return positions && key >= shift(b) ? positions[q_rows.before(b) + key - shift(b)] : key;
    }
};

}  // namespace libflash
