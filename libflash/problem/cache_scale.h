// The scales of a KV cache: the value of an element is its stored value times a scale.
#pragma once

#include <cstdint>

#include "problem/check.h"
#include "problem/tensor.h"

namespace libflash {

// There is one scale for all key heads, or one for each key head, for each sequence and key head, or for each cached row and key
// head. In the last case there may be one for each group of neighbouring channels. Strides are in elements, and 0 for a dimension
// on which the scale does not depend.
struct CacheScale {
    bool present = false;
    float* data = nullptr;
    int64_t batch_stride = 0, block_stride = 0, row_stride = 0, head_stride = 0, group_stride = 0;  // block: an entry or a page
    int64_t groups = 1;
    bool of_rows = false;  // each cached row has its own scales: a call that writes new rows computes and writes their scales
};

struct CacheScaleSizes {
    int64_t batch, cache_blocks, rows, heads, channels;
};

// Checks shape, dtype and device. The number of dimensions says what has a scale: heads (1), sequences (2) or cached rows (3, 4).
CacheScale build_cache_scale(const TensorView& view, const Argument& argument, const CacheScaleSizes& sizes,
                             const Device& device);

}  // namespace libflash
