// Which bytes a strided tensor covers, and whether two tensors share a byte.
#pragma once

#include <cstdint>

#include "problem/tensor.h"

namespace libflash {

struct Footprint {
    uintptr_t begin = 0, end = 0;  // addresses of the first byte and one past the last
    int ndim = 0;                  // number of dimensions of more than one element
    int64_t size[FLASH_MAX_NDIM] = {0, 0, 0, 0};
    int64_t stride[FLASH_MAX_NDIM] = {0, 0, 0, 0};  // in bytes, in descending order
    int64_t element = 0;                            // bytes of one element
};

// The tensor must have elements, and its extent in bytes must not overflow.
Footprint footprint_of(const TensorView& view);

// Whether no two elements of the tensor share a byte. The answer true is always right. The answer false is wrong for a few
// unusual strides with which elements interleave without sharing bytes.
bool disjoint_elements(const Footprint& one);

// Whether no byte belongs to both tensors. The answer true is always right. The answer false is also right if the tensors are
// slices of one buffer along any axis, such as dq, dk and dv in one tensor.
bool disjoint(const Footprint& one, const Footprint& other);

}  // namespace libflash
