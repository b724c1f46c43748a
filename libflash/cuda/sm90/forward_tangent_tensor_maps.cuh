// The tensor maps of the sm_90a forward_tangent kernel, and the host code that encodes them.
#pragma once

#include "cuda/attention/tangent_params.h"
#include "cuda/sm90/extent.cuh"
#include "cuda/tile/tensor_map.cuh"

namespace libflash::cuda::sm90 {

struct ForwardTangentTensorMaps {
    CUtensorMap q, tq, k, tk, v, tv;
};

// An absent tangent is not read; its map is that of its primal. Without keys, neither are K and V: their maps are that of Q.
template <class Traits>
cudaError_t encode(ForwardTangentTensorMaps* maps, const ForwardTangentParams& params) {
    const int64_t queries = params.q_lengths.capacity, keys = params.k_lengths.capacity,
                  kv_heads = params.heads_q / params.group_size;
    cudaError_t error = cudaSuccess;
    const auto encode_pair = [&](CUtensorMap* map, CUtensorMap* tangent_map, const RowsParams& rows, const RowsParams& tangent,
                                 int64_t channels, int64_t count, int64_t heads, int box_rows) {
        for (const bool of_tangent : {false, true}) {
            const RowsParams& from = of_tangent && tangent.data ? tangent : rows;
            if (error == cudaSuccess)
                error = encode_map<typename Traits::T>(of_tangent ? tangent_map : map,
                                                       extent(from, channels, count, heads, params.batch), box_rows);
        }
    };
    encode_pair(&maps->q, &maps->tq, params.q, params.tq, params.head_dim, queries, params.heads_q, Traits::kGroupRows);
    if (keys == 0) {
        maps->k = maps->tk = maps->v = maps->tv = maps->q;
        return error;
    }
    encode_pair(&maps->k, &maps->tk, params.k, params.tk, params.head_dim, keys, kv_heads, Traits::kBlockN);
    encode_pair(&maps->v, &maps->tv, params.v, params.tv, params.head_dim_v, keys, kv_heads, Traits::kBlockN);
    return error;
}

}  // namespace libflash::cuda::sm90
