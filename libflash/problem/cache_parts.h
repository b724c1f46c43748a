// Checks of the parts of a KV cache that decode and a write by slots share: types, scales, rotary tables.
#pragma once

#include "problem/decode.h"

namespace libflash {

// Sets cache.dtype. The caches must have the type of the rows or a type of 8 bits. `rows`: the name of the argument with the
// rows.
void check_cache_types(KvCache& cache, DType of_rows, const char* rows);

// Checks that an INT8 cache has a scale, and that a call that writes new rows (`writes`) gives scales of rows only for an 8-bit
// cache.
void check_scale_given(const KvCache& cache, const CacheScale& scale, const char* name, bool writes);

// Checks that both tables are given or none.
void check_rotary_given(const TensorView& cos, const TensorView& sin);
// Checks the tables for keys of the cache, of which the rope part is rotated if there is one.
void check_rotary_tables(const TensorView& cos, const TensorView& sin, const KvCache& cache, DType of_rows, const Device& device);

}  // namespace libflash
