// Parameters of 8-bit KV caches and of writes to a cache, for kernels of several folders. No CUDA header.
#pragma once

#include <cstdint>

#include "cuda/attention/params.h"

namespace libflash::cuda {

// The elements of a cache: none: the type of the rows, otherwise codes of 8 bits.
enum class CodeType : int32_t { none, e4m3, e5m2, int8 };

// Where the scales of cached rows are. Strides in elements; 0 for a dimension on which the scales do not depend.
struct CacheScaleParams {
    float* data;                             // nullptr: no scales
    int64_t batch, block, row, head, group;  // block: an entry or a page
    int32_t groups;                          // of channels
    bool of_rows;                            // each row has its own scales: a write computes them
};

struct RotaryParams {
    const void *cos, *sin;  // (positions, pairs); nullptr: no rotary embedding
    int64_t cos_row, sin_row;
    int32_t positions, pairs;
    bool interleaved, is_float;
};

// Writes of new rows to slots of a cache. `batch` strides: 0 for new rows; the stride of entries or pages for the cache.
struct CacheWriteParams {
    RowsParams k_new, v_new, rope_new, k, v, rope;  // data is nullptr if a part does not exist
    CacheScaleParams k_scale, v_scale;
    RotaryParams rotary;
    const void* slots;
    const int32_t* positions;  // with a rotary embedding
    int64_t rows, cache_blocks, cache_block_rows;
    int32_t heads, parts;  // parts: how many of keys, values and rope parts exist
    int32_t channels, channels_v, channels_rope;
    CodeType code;
    bool wide_slots;  // int64, else int32
};

}  // namespace libflash::cuda
