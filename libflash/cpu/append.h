// The first pass of decode, shared by the scalar reference and the engine: rotates new keys and writes new keys and values to
// the cache in place. Also the address of a cached row and the rotary embedding of queries. Rotations are computed in double, so
// every kernel stores the same bits.
#pragma once

#include <cstdint>

#include "problem/decode.h"

namespace libflash::cpu {

// Offset in elements of key j of sequence b, head 0, in a cache tensor. Contiguous cache: row j of the sequence's entry. Paged
// cache: through the block table.
inline int64_t cache_row_offset(const KvCache& cache, const TensorView& tensor, int64_t b, int64_t j) {
    if (!cache.paged()) return (cache.batch_idx ? cache.batch_idx[b] : b) * tensor.stride[0] + j * tensor.stride[1];
    const int64_t column = j / cache.page_size;
    const int64_t page = cache.block_table[b * cache.block_table_stride[0] + column * cache.block_table_stride[1]];
    return page * tensor.stride[0] + (j - column * cache.page_size) * tensor.stride[1];
}

// Reads one query row as double, after rotation (if the call has a rotary embedding) and rounding to its type.
void read_query(const DecodeProblem& problem, int64_t b, int64_t i, int64_t h, double* row);

// Rotates all query rows by their positions, rounds them to their type and stores them as (batch, seqlen_q, heads_q, head_dim).
void rotate_queries(const DecodeProblem& problem, void* rotated, int threads);

// Writes k_new and v_new after the cached keys. Does nothing without new keys.
void append_new_keys(const DecodeProblem& problem, int threads);

}  // namespace libflash::cpu
