// A shard of the keys of each sequence, as problem/cache_shard.h on the host: row_of_key() is the row in the cache of a key of
// this shard.
#pragma once

#include "cuda/attention/decode_params.h"

namespace libflash::cuda {

// How many keys before `key` this shard has. `key` is not negative.
__device__ __forceinline__ int row_of_key(const CacheShardParams& shard, int key) {
    if (shard.count <= 1) return key;
    const int64_t round = key / shard.round, rest = key - round * shard.round - shard.first;
    return static_cast<int>(round * shard.keys + min(max(rest, int64_t{0}), shard.keys));
}

// Rows past the last one may have numbers above all keys.
__device__ __forceinline__ int key_of_row(const CacheShardParams& shard, int row) {
    if (shard.count <= 1) return row;
    const int64_t block = row / shard.keys, key = block * shard.round + shard.first + (row - block * shard.keys);
    return static_cast<int>(min(key, int64_t{kUnboundedWindow}));
}

__device__ __forceinline__ bool has_key(const CacheShardParams& shard, int key) {
    return shard.count <= 1 || key_of_row(shard, row_of_key(shard, key)) == key;
}

}  // namespace libflash::cuda
