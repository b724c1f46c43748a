// TensorView, a view of the caller's tensor, and the types that all layers use: DType, Device, strides.
#pragma once

#include <cstddef>
#include <cstdint>

#include "libflash.h"

namespace libflash {

enum class DType : int32_t {
    none = FLASH_DTYPE_NONE,
    f16 = FLASH_DTYPE_FLOAT16,
    bf16 = FLASH_DTYPE_BFLOAT16,
    f32 = FLASH_DTYPE_FLOAT32,
    f64 = FLASH_DTYPE_FLOAT64,
    i32 = FLASH_DTYPE_INT32,
    boolean = FLASH_DTYPE_BOOL,
    i64 = FLASH_DTYPE_INT64,
    e4m3 = FLASH_DTYPE_FLOAT8_E4M3,
    e5m2 = FLASH_DTYPE_FLOAT8_E5M2,
    i8 = FLASH_DTYPE_INT8,
};

inline int64_t element_bytes(DType dtype) {
    switch (dtype) {
        case DType::f16:
        case DType::bf16: return 2;
        case DType::f32:
        case DType::i32: return 4;
        case DType::f64:
        case DType::i64: return 8;
        case DType::boolean:
        case DType::e4m3:
        case DType::e5m2:
        case DType::i8: return 1;
        default: return 0;
    }
}

struct Device {
    int32_t type = FLASH_DEVICE_CPU;
    int32_t id = 0;
    bool is_cuda() const { return type == FLASH_DEVICE_CUDA; }
    bool operator==(const Device& other) const { return type == other.type && id == other.id; }
    bool operator!=(const Device& other) const { return !(*this == other); }
};

// `present` is false for an optional tensor that was not given; the other members then have no meaning.
struct TensorView {
    bool present = false;
    void* data = nullptr;
    DType dtype = DType::none;
    Device device;
    int ndim = 0;
    int64_t shape[FLASH_MAX_NDIM] = {0, 0, 0, 0};
    int64_t stride[FLASH_MAX_NDIM] = {0, 0, 0, 0};

    int64_t elements() const {
        int64_t n = 1;
        for (int i = 0; i < ndim; ++i) n *= shape[i];
        return n;
    }
};

// Strides in elements of q, k, v, out and their gradients, dense (batch, row, head, channel) or packed (row, head, channel). In
// packed tensors `batch` is 0 and rows are counted over all sequences. Channels are contiguous.
struct RowStrides {
    int64_t batch = 0;
    int64_t row = 0;
    int64_t head = 0;
};

inline RowStrides row_strides(const TensorView& t) {
    if (t.ndim == 4) return {t.stride[0], t.stride[1], t.stride[2]};
    return {0, t.stride[0], t.stride[1]};
}

// The same for lse and dlse: (batch, head, row), packed (head, row). Rows need not be contiguous.
inline RowStrides lse_strides(const TensorView& t) {
    if (t.ndim == 3) return {t.stride[0], t.stride[2], t.stride[1]};
    return {0, t.stride[1], t.stride[0]};
}

}  // namespace libflash
