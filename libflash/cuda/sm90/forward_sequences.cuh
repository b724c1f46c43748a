// The query rows and the keys of a sequence: of a forward call, or of a decode call over a cache.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/l2_cache.h"
#include "cuda/attention/prefill_params.h"
#include "cuda/attention/schedule.cuh"

namespace libflash::cuda::sm90 {

struct ForwardKeys {
    int32_t start;     // first row of the sequence in K and V
    int32_t length;    // includes keys that do not fit into the cache: the last key is on the diagonal of the last row
    int32_t existing;  // keys from here on are absent
};

__device__ __forceinline__ SequenceRows query_rows_of(const ForwardParams& params, int batch) {
    return SequenceRows::of(params.q_lengths, batch);
}
__device__ __forceinline__ ForwardKeys keys_of(const ForwardParams& params, int batch) {
    const SequenceRows rows = SequenceRows::of(params.k_lengths, batch);
    return {rows.start, rows.length, rows.length};
}

// Query heads of a unit of the tile scheduler.
__device__ __forceinline__ int heads_of_unit(const ForwardParams&) { return 1; }
__device__ __forceinline__ int heads_of_unit(const PrefillParams& params) { return 1 + params.in_pairs; }

// Sequences that the decode kernels compute have no rows here.
__device__ __forceinline__ SequenceRows query_rows_of(const PrefillParams& params, int batch) {
    SequenceRows rows = SequenceRows::of(params.q_lengths, batch);
    if (rows.owned < params.fewest_rows) rows.owned = rows.length = 0;
    return rows;
}
__device__ __forceinline__ ForwardKeys keys_of(const PrefillParams& params, int batch) {
    const KeyCount count = KeyCount::of(params.cache, batch, SequenceRows::of(params.news, batch).owned);
    return {0, count.length, count.existing};
}

// Bytes of an element of K and V.
__device__ __forceinline__ float key_bytes(const ForwardParams&) { return 2.0f; }
__device__ __forceinline__ float key_bytes(const PrefillParams& params) { return params.code == CodeType::none ? 2.0f : 1.0f; }

// How many heads (with pairs: pairs of heads) are a group of the tile scheduler in a sequence with `keys` keys: the keys and
// values of a group fit into kL2Bytes, and groups are about equal. At least the heads that share a key head are a group.
template <class Params>
__device__ __forceinline__ int heads_of_group(const Params& params, int keys) {
    const float bytes_of_key_head =
        key_bytes(params) * static_cast<float>(keys) * static_cast<float>(params.head_dim + params.head_dim_v);
    const float key_heads = static_cast<float>(kL2Bytes) / fmaxf(bytes_of_key_head, 1.0f);
    const int fit = max(1, static_cast<int>(fminf(key_heads, static_cast<float>(params.heads_q / params.group_size)))),
              heads = params.heads_q / heads_of_unit(params), together = fit * params.group_size / heads_of_unit(params),
              groups = (heads + together - 1) / together;
    return (heads + groups - 1) / groups;
}

}  // namespace libflash::cuda::sm90
