// A tensor's rows as the copy engine is told of them.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/tile/tensor_map.cuh"

namespace libflash::cuda::sm90 {

// Without rows nothing is read, and any address will do.
inline TensorExtent extent(const RowsParams& rows, int64_t columns, int64_t count, int64_t heads, int64_t batch) {
    return {rows.data, columns, count, heads, batch, rows.row, rows.head, rows.batch};
}

}  // namespace libflash::cuda::sm90
