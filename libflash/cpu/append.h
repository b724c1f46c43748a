// The first pass of decode, shared by the scalar truth and the engine: new keys and values are turned and written into the cache,
// in place. Also where a cached key lies, and how a row is turned. Arithmetic in double, so every kernel stores the same bits.
#pragma once

#include <cstdint>

#include "problem/decode.h"

namespace libflash::cpu {

// Offset in elements of key j of sequence b, head 0, in a cache tensor. Contiguous: row j of a cache entry; paged: through the
// table.
inline int64_t cache_row(const KvCache& cache, const TensorView& tensor, int64_t b, int64_t j) {
    if (!cache.paged()) return (cache.batch_idx ? cache.batch_idx[b] : b) * tensor.stride[0] + j * tensor.stride[1];
    const int64_t column = j / cache.page_size;
    const int64_t page = cache.block_table[b * cache.block_table_stride[0] + column * cache.block_table_stride[1]];
    return page * tensor.stride[0] + (j - column * cache.page_size) * tensor.stride[1];
}

// One query row as the scores see it: turned, if the call has a rotary embedding, and rounded to its type; here widened.
void read_query(const DecodeProblem& problem, int64_t b, int64_t i, int64_t h, double* row);

// All query rows turned by their positions and rounded to their type, into an array (batch, seqlen_q, heads_q, head_dim).
void turn_queries(const DecodeProblem& problem, void* turned, int threads);

// Writes k_new and v_new behind the cached keys; nothing if there are none.
void append_new_keys(const DecodeProblem& problem, int threads);

}  // namespace libflash::cpu
