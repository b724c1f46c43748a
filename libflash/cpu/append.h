// The first pass of decode, shared by the scalar reference and the engine: rotates new keys and writes new keys and values to
// the cache in place. Also the address of a cached row and the rotary embedding of queries. Rotations are computed in double, so
// every kernel stores the same bits.
#pragma once

#include <cstdint>

#include "problem/decode.h"

namespace libflash::cpu {

// Where a key is stored: the cache entry or page, and the row in that entry or page.
struct CachedRow {
    int64_t block, row;
};

// Where key j of sequence b is stored. Contiguous cache: row j of the sequence's entry. Paged cache: through the block table.
inline CachedRow cached_row(const KvCache& cache, int64_t b, int64_t j) {
    if (!cache.paged()) return {cache.batch_idx ? cache.batch_idx[b] : b, j};
    const int64_t column = j / cache.page_size;
    return {cache.block_table[b * cache.block_table_stride[0] + column * cache.block_table_stride[1]],
            j - column * cache.page_size};
}

// Offset in elements of a row of one head in a cache tensor.
inline int64_t offset_of(const TensorView& tensor, CachedRow at, int64_t head) {
    return at.block * tensor.stride[0] + at.row * tensor.stride[1] + head * tensor.stride[2];
}

// Address of the scale of the first channel group, for one row and head; nullptr without scales.
inline float* scales_of(const CacheScale& scale, int64_t b, CachedRow at, int64_t head) {
    if (!scale.present) return nullptr;
    return scale.data + b * scale.batch_stride + at.block * scale.block_stride + at.row * scale.row_stride +
           head * scale.head_stride;
}

// Reads one query row as double, after rotation (if the call has a rotary embedding) and rounding to its type.
void read_query(const DecodeProblem& problem, int64_t b, int64_t i, int64_t h, double* row);

// Rotates the query rows of all sequences by their positions, rounds them to their type and stores them as (row, heads_q,
// head_dim), where rows count over all sequences (Sequences::before).
void rotate_queries(const DecodeProblem& problem, void* rotated, int threads);

// Writes k_new and v_new after the cached keys, converted to the type of the cache. Keys that the call's shard of the cache does
// not have are not written. Does nothing without new keys.
void append_new_keys(const DecodeProblem& problem, int threads);

}  // namespace libflash::cpu
