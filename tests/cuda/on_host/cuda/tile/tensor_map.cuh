// Replaces the library's header: a tensor map holds its arguments.
#pragma once

#include <cuda.h>

#include "emulation.h"

namespace libflash::cuda {

struct TensorExtent {
    void* data;
    int64_t columns, rows, heads, batch;
    int64_t row_stride, head_stride, batch_stride;
};

struct MapWords {
    TensorExtent tensor;
    int box_rows, box_columns, element_bytes;
    int row_bytes() const { return box_columns * element_bytes; }
};
static_assert(sizeof(MapWords) <= sizeof(CUtensorMap), "it is kept there");

template <class T>
constexpr int kColumnsOfBox = 128 / sizeof(T);
template <class T>
cudaError_t encode_map(CUtensorMap* map, const TensorExtent& tensor, int box_rows, int box_columns = kColumnsOfBox<T>) {
    const MapWords words{tensor, box_rows, box_columns, sizeof(T)};
    std::memcpy(map, &words, sizeof words);
    return cudaSuccess;
}

}  // namespace libflash::cuda
