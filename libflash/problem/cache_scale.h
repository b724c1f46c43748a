// The scales of a KV cache: the real value of an element is its stored value times a scale.
#pragma once

#include <cstdint>

#include "problem/check.h"
#include "problem/tensor.h"

namespace libflash {

// A scale for each key head, or for each sequence and key head, or for each cached row and key head, and there one for each group
// of neighbouring channels. Strides are 0 along what a scale does not depend on.
struct CacheScale {
    bool present = false;
    float* data = nullptr;
    int64_t batch_stride = 0, block_stride = 0, row_stride = 0, head_stride = 0, group_stride = 0;  // block: an entry or a page
    int64_t groups = 1;
    bool of_rows = false;  // each cached row has its own: an append computes and writes them
};

struct CacheScaleSizes {
    int64_t batch, cache_blocks, rows, heads, channels;
};

// Checks shape, dtype and device; the number of dimensions says what the scales belong to.
CacheScale build_cache_scale(const TensorView& view, const Argument& argument, const CacheScaleSizes& sizes,
                             const Device& device);

}  // namespace libflash
