// The description of a tensor from which encode_map() makes a tensor map.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/tile/tensor_map.cuh"

namespace libflash::cuda::sm90 {

// `count` rows of `columns` elements in each head.
inline TensorExtent extent(const RowsParams& rows, int64_t columns, int64_t count, int64_t heads, int64_t batch) {
    return {rows.data, columns, count, heads, batch, rows.row, rows.head, rows.batch};
}

}  // namespace libflash::cuda::sm90
