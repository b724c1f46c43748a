// The tensor maps of the sm_90a backward_tangent kernels, and the host code that encodes them.
#pragma once

#include "cuda/attention/tangent_params.h"
#include "cuda/sm90/extent.cuh"
#include "cuda/tile/tensor_map.cuh"

namespace libflash::cuda::sm90 {

// The maps of one side: Q, tQ, dO, tdO or K, tK, V, tV.
struct TangentSideMaps {
    CUtensorMap first, tfirst, second, tsecond;
};

struct BackwardTangentTensorMaps {
    TangentSideMaps rows, cols;
};

// An absent tangent is not read; it gets the map of its primal.
template <class T>
cudaError_t encode_side(TangentSideMaps* maps, const BackwardTangentParams& params, bool keys, int box_rows) {
    const int64_t count = (keys ? params.k_lengths : params.q_lengths).capacity, heads = keys ? params.heads_k : params.heads_q;
    cudaError_t error = cudaSuccess;
    const auto encode = [&](CUtensorMap* map, const RowsParams& rows, const RowsParams& tangent, int64_t channels) {
        const RowsParams& from = tangent.data ? tangent : rows;
        if (error == cudaSuccess) error = encode_map<T>(map, extent(from, channels, count, heads, params.batch), box_rows);
    };
    const RowsParams &first = keys ? params.k : params.q, &second = keys ? params.v : params.dout;
    encode(&maps->first, first, first, params.head_dim);
    encode(&maps->tfirst, first, keys ? params.tk : params.tq, params.head_dim);
    encode(&maps->second, second, second, params.head_dim_v);
    encode(&maps->tsecond, second, keys ? params.tv : params.tdout, params.head_dim_v);
    return error;
}

// If there are no columns, they are not read; they get the maps of the rows.
template <class Traits>
cudaError_t encode(BackwardTangentTensorMaps* maps, const BackwardTangentParams& params) {
    using T = typename Traits::T;
    const cudaError_t error = encode_side<T>(&maps->rows, params, Traits::kKeys, Traits::kGroupRows);
    maps->cols = maps->rows;
    if (error != cudaSuccess || (Traits::kKeys ? params.q_lengths : params.k_lengths).capacity == 0) return error;
    return encode_side<T>(&maps->cols, params, !Traits::kKeys, Traits::kBlockN);
}

}  // namespace libflash::cuda::sm90
