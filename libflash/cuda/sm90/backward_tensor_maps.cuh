// The tensor maps of the sm_90a backward kernel, and the host code that encodes them.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/sm90/extent.cuh"
#include "cuda/tile/tensor_map.cuh"

namespace libflash::cuda::sm90 {

struct BackwardTensorMaps {
    CUtensorMap q, dout, k, v, dk, dv;
};

template <class Traits>
cudaError_t encode(BackwardTensorMaps* maps, const BackwardParams& params) {
    using T = typename Traits::T;
    const int64_t queries = params.q_lengths.capacity, keys = params.k_lengths.capacity, dim = params.head_dim,
                  dim_v = params.head_dim_v;
    cudaError_t error = cudaSuccess;
    // A map needs a valid address even if the tensor has no rows: then q and dout get the map of k, which is not used.
    const auto one = [&](CUtensorMap& map, const TensorExtent& tensor, int rows) {
        if (error == cudaSuccess) error = encode_map<T>(&map, tensor, rows);
    };
    const TensorExtent k = extent(params.k, dim, keys, params.heads_k, params.batch);
    const auto of_queries = [&](const RowsParams& rows, int64_t columns) {
        return queries == 0 ? k : extent(rows, columns, queries, params.heads_q, params.batch);
    };
    one(maps->q, of_queries(params.q, dim), Traits::kBlockM);
    one(maps->dout, of_queries(params.dout, dim_v), Traits::kBlockM);
    one(maps->k, k, Traits::kBlockN);
    one(maps->v, extent(params.v, dim_v, keys, params.heads_k, params.batch), Traits::kBlockN);
    one(maps->dk, extent(params.dk, dim, keys, params.heads_k, params.batch), 16);
    one(maps->dv, extent(params.dv, dim_v, keys, params.heads_k, params.batch), 16);
    return error;
}

}  // namespace libflash::cuda::sm90
