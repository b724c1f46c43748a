// Host code that encodes tensor maps for TMA. The encoding function belongs to the driver and needs a current context.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "cuda/driver.h"

namespace libflash::cuda {

// A tensor of elements (batch, head, row, column); strides in elements, columns contiguous.
struct TensorExtent {
    void* data;
    int64_t columns, rows, heads, batch;
    int64_t row_stride, head_stride, batch_stride;
};

inline CUtensorMapDataType map_type(__nv_bfloat16) { return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; }
inline CUtensorMapDataType map_type(__half) { return CU_TENSOR_MAP_DATA_TYPE_FLOAT16; }
inline CUtensorMapDataType map_type(uint8_t) { return CU_TENSOR_MAP_DATA_TYPE_UINT8; }

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The encoding function; nullptr if the driver does not have it.
inline EncodeTiled encode_tiled() {
    static const auto function = reinterpret_cast<EncodeTiled>(driver_function("cuTensorMapEncodeTiled"));
    return function;
}

// Columns in 128 bytes.
template <class T>
constexpr int kColumnsOfBox = 128 / sizeof(T);

// Encodes a map with boxes of `box_rows` rows of 128 bytes (64 columns of 16-bit values), in the layout of SwizzledTile. Rows of
// fewer bytes follow one another. Address and strides must be multiples of 16 bytes.
template <class T>
cudaError_t encode_map(CUtensorMap* map, const TensorExtent& tensor, int box_rows, int box_columns = kColumnsOfBox<T>) {
    const EncodeTiled encode = encode_tiled();
    if (!encode) return cudaErrorNotSupported;
    const auto size = [](int64_t extent) { return static_cast<cuuint64_t>(std::max<int64_t>(1, extent)); };
    const auto bytes = [](int64_t stride) { return static_cast<cuuint64_t>(stride) * sizeof(T); };
    const cuuint64_t sizes[4] = {size(tensor.columns), size(tensor.rows), size(tensor.heads), size(tensor.batch)};
    const cuuint64_t strides[3] = {bytes(tensor.row_stride), bytes(tensor.head_stride), bytes(tensor.batch_stride)};
    const cuuint32_t box[4] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1, 1};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    const CUtensorMapSwizzle swizzle = box_columns == kColumnsOfBox<T> ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
    // CUresult and cudaError_t use the same numbers.
    return static_cast<cudaError_t>(encode(map, map_type(T()), 4, tensor.data, sizes, strides, box, steps,
                                           CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

}  // namespace libflash::cuda
