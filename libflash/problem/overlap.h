// Which bytes a strided tensor touches, and whether two tensors share any.
#pragma once

#include <cstdint>

#include "problem/tensor.h"

namespace libflash {

struct Footprint {
    uintptr_t begin = 0, end = 0;  // bytes, from the first to past the last
    int ndim = 0;                  // dimensions of more than one element
    int64_t size[FLASH_MAX_NDIM] = {0, 0, 0, 0};
    int64_t stride[FLASH_MAX_NDIM] = {0, 0, 0, 0};  // bytes, largest first
    int64_t element = 0;                            // bytes of one element
};

// Of a tensor with elements, whose extent in bytes is known not to overflow.
Footprint footprint_of(const TensorView& view);

// No two elements share a byte. Sound; refuses a few exotic stride patterns whose elements interleave without meeting.
bool disjoint_elements(const Footprint& one);

// No byte belongs to both. Sound, and exact for slices of one buffer along any axis (dq, dk and dv inside one packed tensor).
bool disjoint(const Footprint& one, const Footprint& other);

}  // namespace libflash
