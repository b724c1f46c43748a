// Parameters of 8-bit KV caches and of writes to a cache, for kernels of several folders. No CUDA header.
#pragma once

#include <cstdint>

#include "cuda/attention/params.h"

namespace libflash::cuda {

// What the elements of a cache are: the type of the rows, or codes of 8 bits.
enum class CodeType : int32_t { none, e4m3, e5m2, int8 };

// Where the scale of a cached row is: strides in elements, 0 along what it does not depend on.
struct CacheScaleParams {
    float* data;                             // nullptr: no scales
    int64_t batch, block, row, head, group;  // block: an entry or a page
    int32_t groups;                          // of channels
    bool of_rows;                            // a write computes the scales of its rows
};

struct RotaryParams {
    const void *cos, *sin;  // (positions, pairs); nullptr: no rotary embedding
    int64_t cos_row, sin_row;
    int32_t positions, pairs;
    bool interleaved, is_float;
};

// New rows to slots of a cache. Row strides of new rows: `batch` is 0. Strides of the cache: `batch` is that of entries or pages.
struct CacheWriteParams {
    RowsParams k_new, v_new, rope_new, k, v, rope;  // data is nullptr where there is no such part
    CacheScaleParams k_scale, v_scale;
    RotaryParams rotary;
    const void* slots;
    const int32_t* positions;  // with a rotary embedding
    int64_t rows, cache_blocks, cache_block_rows;
    int32_t heads, parts;  // parts: of keys, values and rope parts those that are there
    int32_t channels, channels_v, channels_rope;
    CodeType code;
    bool wide_slots;  // int64, else int32
};

}  // namespace libflash::cuda
