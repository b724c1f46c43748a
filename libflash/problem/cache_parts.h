// Checks of the parts of a KV cache that decode and a write by slots share: types, scales, rotary tables.
#pragma once

#include "problem/decode.h"

namespace libflash {

// Sets cache.dtype. The type of the caches is that of the rows, which are the argument `rows`, or one of 8 bits.
void check_cache_types(KvCache& cache, DType of_rows, const char* rows);

// `writes`: the call writes new rows to the cache.
void check_scale_given(const KvCache& cache, const CacheScale& scale, const char* name, bool writes);

// That both tables are given or none.
void check_rotary_given(const TensorView& cos, const TensorView& sin);
// For rows of `head_dim` channels.
void check_rotary_tables(const TensorView& cos, const TensorView& sin, int64_t head_dim, DType of_rows, const Device& device);

}  // namespace libflash
