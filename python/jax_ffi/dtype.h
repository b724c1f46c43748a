/* Conversion of XLA's description of an array (type code, rank, dimensions) to the library's. XLA's arrays are dense and
 * row-major. */
#ifndef LIBFLASH_JAX_FFI_DTYPE_H
#define LIBFLASH_JAX_FFI_DTYPE_H

#include <stdbool.h>
#include <string.h>

#include "libflash.h"
#include "xla_ffi.h"

static inline int32_t dtype_of_xla(int32_t code) {
    switch (code) {
        case XLA_PRED: return FLASH_DTYPE_BOOL;
        case XLA_S32: return FLASH_DTYPE_INT32;
        case XLA_F16: return FLASH_DTYPE_FLOAT16;
        case XLA_BF16: return FLASH_DTYPE_BFLOAT16;
        case XLA_F32: return FLASH_DTYPE_FLOAT32;
        case XLA_F64: return FLASH_DTYPE_FLOAT64;
        case XLA_S64: return FLASH_DTYPE_INT64;
        case XLA_S8: return FLASH_DTYPE_INT8;
        case XLA_F8E4M3FN: return FLASH_DTYPE_FLOAT8_E4M3;
        case XLA_F8E5M2: return FLASH_DTYPE_FLOAT8_E5M2;
        default: return FLASH_DTYPE_NONE;
    }
}

/* False if the library does not have the type, or if the array has more dimensions than the library supports. */
static inline bool describe_tensor(flash_tensor_t* tensor, void* data, int32_t code, int64_t rank, const int64_t* dims) {
    int64_t stride = 1;
    memset(tensor, 0, sizeof *tensor);
    tensor->data = data;
    tensor->dtype = dtype_of_xla(code);
    if (rank < 0 || rank > FLASH_MAX_NDIM || tensor->dtype == FLASH_DTYPE_NONE) return false;
    tensor->ndim = (int32_t)rank;
    for (int64_t axis = rank - 1; axis >= 0; axis--) {
        tensor->shape[axis] = dims[axis];
        tensor->stride[axis] = stride;
        stride *= dims[axis];
    }
    return true;
}

#endif /* LIBFLASH_JAX_FFI_DTYPE_H */
