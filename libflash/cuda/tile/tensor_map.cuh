// Encodes, on the host, what the copy engine has to know of a tensor. The function is the driver's and is asked for at run time: nothing here is
// linked against the driver.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace libflash::cuda {

// Element (batch, head, row, column) of 16-bit values; strides in elements, columns are contiguous.
struct TensorExtent {
    void* data;
    int64_t columns, rows, heads, batch;
    int64_t row_stride, head_stride, batch_stride;
};

inline CUtensorMapDataType map_type(__nv_bfloat16) { return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; }
inline CUtensorMapDataType map_type(__half) { return CU_TENSOR_MAP_DATA_TYPE_FLOAT16; }

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// nullptr: the driver has none.
inline EncodeTiled encode_tiled() {
    static const EncodeTiled function = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result;
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(found) : nullptr;
    }();
    return function;
}

// Sizes and strides (of all dimensions but the first), innermost first. Address and strides are multiples of 16 bytes.
template <class T, int kDims>
cudaError_t encode_boxes(CUtensorMap* map, void* data, const int64_t (&sizes)[kDims], const int64_t (&strides)[kDims - 1],
                         int box_rows) {
    const EncodeTiled encode = encode_tiled();
    if (!encode) return cudaErrorNotSupported;
    cuuint64_t extents[kDims], bytes[kDims - 1];
    cuuint32_t box[kDims], steps[kDims];
    for (int i = 0; i < kDims; ++i) {
        extents[i] = static_cast<cuuint64_t>(std::max<int64_t>(1, sizes[i]));
        box[i] = i == 0 ? 64 : (i == 1 ? static_cast<cuuint32_t>(box_rows) : 1);
        steps[i] = 1;
    }
    for (int i = 0; i < kDims - 1; ++i) bytes[i] = static_cast<cuuint64_t>(strides[i]) * sizeof(T);
    // Numbers of CUresult and of cudaError_t agree.
    return static_cast<cudaError_t>(encode(map, map_type(T()), kDims, data, extents, bytes, box, steps,
                                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

// For boxes of `box_rows` rows and 64 columns in the order of SwizzledTile, at (column, row, head, batch).
template <class T>
cudaError_t encode_map(CUtensorMap* map, const TensorExtent& t, int box_rows) {
    return encode_boxes<T, 4>(map, t.data, {t.columns, t.rows, t.heads, t.batch}, {t.row_stride, t.head_stride, t.batch_stride},
                              box_rows);
}

// For boxes of which the first `count` rows alone count, at (column, box_rows - count, row + count, head, batch): two dimensions go down the rows, and
// begin a box before the tensor; the first of them ends with the box. What of the box lies behind is read as zeros and not written.
template <class T>
cudaError_t encode_ending_map(CUtensorMap* map, const TensorExtent& t, int box_rows) {
    return encode_boxes<T, 5>(map, static_cast<T*>(t.data) - box_rows * t.row_stride,
                              {t.columns, box_rows, t.rows + 1, t.heads, t.batch},
                              {t.row_stride, t.row_stride, t.head_stride, t.batch_stride}, box_rows);
}

}  // namespace libflash::cuda
