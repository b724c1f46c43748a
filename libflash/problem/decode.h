// DecodeProblem: a decode call in checked form, a few query rows per sequence over a cache of keys and values.
#pragma once

#include <cstdint>

#include "problem/attention.h"
#include "problem/cache_scale.h"

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

struct DecodeProblem : ScoreOptions {
    Device device;
    DType dtype = DType::none;
    int64_t batch = 0, seqlen_q = 0, seqlen_new = 0;
    int64_t heads_q = 0, heads_k = 0;
    int64_t head_dim = 0, head_dim_v = 0;

    TensorView q, out, lse;  // lse may be absent
    KvCache cache;
    const int32_t* cache_seqlens = nullptr;  // valid keys before the call; nullptr: default_seqlen
    int64_t default_seqlen = 0;
    const int32_t* leftpad = nullptr;  // optional: the number of first keys of a sequence that do not exist

    TensorView k_new, v_new, k_rope_new;  // absent: nothing is appended
    TensorView rotary_cos, rotary_sin;
    bool rotary_interleaved = false;

    Request request;

    int64_t group_size() const { return heads_k ? heads_q / heads_k : 0; }
    // Reads the array, so for host tensors only.
    int64_t cached(int64_t b) const { return cache_seqlens ? cache_seqlens[b] : default_seqlen; }
};

}  // namespace libflash
