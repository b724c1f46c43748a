// The tensor maps of the sm_90a backward kernels for wide heads, and the host code that encodes them.
#pragma once

#include "cuda/sm90/backward_wide_traits.cuh"
#include "cuda/sm90/extent.cuh"

namespace libflash::cuda::sm90 {

struct BackwardWideTensorMaps {
    CUtensorMap rows, second_rows;  // of S, of dP
    CUtensorMap streamed, added;    // tensors of the columns
    bool zero_fill;                 // columns after the end of a sequence may belong to other sequences or hold any value
};

template <class Traits>
cudaError_t encode(BackwardWideTensorMaps* maps, const BackwardParams& params) {
    const int64_t queries = params.q_lengths.capacity, keys = params.k_lengths.capacity, dim = params.head_dim,
                  dim_v = params.head_dim_v;
    const LengthsParams& columns = Traits::kKeys ? params.q_lengths : params.k_lengths;
    maps->zero_fill = columns.cu || columns.used;
    const auto of_queries = [&](const RowsParams& rows, int64_t channels) {
        return extent(rows, channels, queries, params.heads_q, params.batch);
    };
    const auto of_keys = [&](const RowsParams& rows, int64_t channels) {
        return extent(rows, channels, keys, params.heads_k, params.batch);
    };
    const TensorExtent q = of_queries(params.q, dim), dout = of_queries(params.dout, dim_v), k = of_keys(params.k, dim),
                       v = of_keys(params.v, dim_v);
    const TensorExtent &rows = Traits::kKeys ? k : q, &second_rows = Traits::kKeys ? v : dout;
    // If there are no columns, their tensors are not read, but their maps need a valid address.
    const bool no_columns = (Traits::kKeys ? queries : keys) == 0;
    const TensorExtent &scored = no_columns ? rows : Traits::kKeys ? q : k, &other = no_columns ? rows : Traits::kKeys ? dout : v;
    cudaError_t error = cudaSuccess;
    const auto one = [&](CUtensorMap& map, const TensorExtent& tensor) {
        if (error == cudaSuccess) error = encode_map<typename Traits::T>(&map, tensor, 64);
    };
    one(maps->rows, rows);
    one(maps->second_rows, second_rows);
    one(maps->streamed, Traits::kDifferences ? other : scored);
    one(maps->added, Traits::kDifferences ? scored : other);
    return error;
}

}  // namespace libflash::cuda::sm90
