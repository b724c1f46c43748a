// The tensor maps of the sm_90a forward kernel, and the host code that encodes them.
#pragma once

#include "cuda/attention/prefill_params.h"
#include "cuda/sm90/extent.cuh"
#include "cuda/sm90/forward_consumer_thread.cuh"
#include "cuda/tile/tensor_map.cuh"

#include <algorithm>

namespace libflash::cuda::sm90 {

struct ForwardTensorMaps {
    CUtensorMap q, k, v, out;
    bool all_see_keys;      // the host knows that every query row sees a key
    bool zero_fill_values;  // rows after the keys of a sequence may belong to other sequences or hold any value
    int box_rows;           // over a cache: keys of a box, a power of two and a multiple of 16
};

// If the first and the last row see a key, so do the rows between them.
inline bool all_see_keys(const ForwardParams& params) {
    const LengthsParams &queries = params.q_lengths, &keys = params.k_lengths;
    if (queries.cu || queries.used || keys.cu || keys.used) return false;
    const auto sees_keys = [&](int64_t row) {
        const int64_t diagonal = row + (params.mask.top_left ? 0 : int64_t{keys.capacity} - queries.capacity);
        return std::max<int64_t>(0, diagonal - params.mask.left) <
               std::min<int64_t>(keys.capacity, diagonal + params.mask.right + 1);
    };
    return sees_keys(0) && sees_keys(queries.capacity - 1);
}

// Rows of a TMA box: the largest power of two that divides a tile and, with pages, a page.
inline int box_rows(const CacheParams& cache, int tile) {
    const int rows = tile | (cache.table ? static_cast<int>(cache.page_size.divisor) : 0);
    return rows & -rows;
}

// The maps of K and V over a cache: page or entry, key head, row, channel.
template <class Traits>
cudaError_t encode_cache(ForwardTensorMaps* maps, const PrefillParams& params) {
    using T = std::conditional_t<Traits::kCodes, uint8_t, typename Traits::T>;
    constexpr int kColumns = Traits::kCodes ? Traits::kHeadDim : kColumnsOfBox<T>;
    const CacheParams& cache = params.cache;
    const int64_t rows = cache.table ? static_cast<int64_t>(cache.page_size.divisor) : cache.capacity,
                  heads = params.heads_q / params.group_size;
    maps->all_see_keys = false;
    maps->zero_fill_values = true;
    // A pair of thread blocks needs at least two boxes to share.
    maps->box_rows = std::min(box_rows(cache, Traits::kBlockN), params.in_pairs ? Traits::kBlockN / 2 : Traits::kBlockN);
    const cudaError_t error =
        encode_map<T>(&maps->k, extent(cache.k, params.head_dim, rows, heads, cache.pages), maps->box_rows, kColumns);
    if (error != cudaSuccess) return error;
    return encode_map<T>(&maps->v, extent(cache.v, params.head_dim_v, rows, heads, cache.pages), maps->box_rows, kColumns);
}

// The maps of Q and, where TMA stores it, of O.
template <class Traits>
cudaError_t encode_queries(ForwardTensorMaps* maps, const ForwardParams& params) {
    using T = typename Traits::T;
    const int64_t queries = params.q_lengths.capacity;
    const cudaError_t error =
        encode_map<T>(&maps->q, extent(params.q, params.head_dim, queries, params.heads_q, params.batch), Traits::kGroupRows);
    if (!Traits::kTmaStore || error != cudaSuccess) return error;
    return encode_map<T>(&maps->out, extent(params.out, params.head_dim_v, queries, params.heads_q, params.batch),
                         ForwardConsumerThread::kWarpRows);
}

template <class Traits>
cudaError_t encode(ForwardTensorMaps* maps, const ForwardParams& params) {
    using T = typename Traits::T;
    const int64_t keys = params.k_lengths.capacity, kv_heads = params.heads_q / params.group_size;
    // Without keys, K and V are not read, but their maps need a valid address: they get the address of q.
    const TensorExtent q = extent(params.q, params.head_dim, params.q_lengths.capacity, params.heads_q, params.batch),
                       k = keys > 0 ? extent(params.k, params.head_dim, keys, kv_heads, params.batch) : q,
                       v = keys > 0 ? extent(params.v, params.head_dim_v, keys, kv_heads, params.batch) : q;
    maps->all_see_keys = all_see_keys(params);
    maps->zero_fill_values = params.k_lengths.cu || params.k_lengths.used;
    cudaError_t error = encode_map<T>(&maps->k, k, Traits::kBlockN);
    if (error == cudaSuccess) error = encode_map<T>(&maps->v, v, Traits::kBlockN);
    return error == cudaSuccess ? encode_queries<Traits>(maps, params) : error;
}

}  // namespace libflash::cuda::sm90
