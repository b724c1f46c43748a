// CacheWriteProblem: a write of new rows to slots of a KV cache in checked form.
#pragma once

#include <cstdint>

#include "problem/decode.h"

namespace libflash {

struct CacheWriteProblem {
    Device device;
    DType dtype = DType::none;
    int64_t rows = 0, heads_k = 0;
    KvCache cache;                        // without v: keys alone
    TensorView k_new, v_new, k_rope_new;  // (rows, heads, channels)
    TensorView slots;                     // INT32 or INT64, one for each row
    const int32_t* positions = nullptr;   // of each row, with a rotary embedding
    TensorView rotary_cos, rotary_sin;
    bool rotary_interleaved = false;
    Request request;

    int64_t cache_blocks() const { return cache.k.shape[0]; }
    int64_t cache_block_rows() const { return cache.k.shape[1]; }

    // The functions below read the arrays, so they are for host tensors only.
    int64_t slot(int64_t row) const {
        return slots.dtype == DType::i64 ? static_cast<const int64_t*>(slots.data)[row]
                                         : static_cast<const int32_t*>(slots.data)[row];
    }
    // Whether the row is written; it is skipped if its slot is outside the cache.
    bool writes(int64_t row) const { return slot(row) >= 0 && slot(row) < cache_blocks() * cache_block_rows(); }
};

}  // namespace libflash
