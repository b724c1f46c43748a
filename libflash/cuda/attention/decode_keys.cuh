// The keys that a thread block of decode computes, and the address of each key: in a contiguous cache entry, or in a page of the
// block table. Lengths, entries and page numbers come from device memory unchecked; they are clamped here to the size of the
// cache.
#pragma once

#include "cuda/attention/cache_shard.cuh"
#include "cuda/attention/decode_params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/prefetch.cuh"

namespace libflash::cuda {

// How lengths and block table entries are read: with plain loads, or with relaxed loads that may run before the previous kernel
// has ended.
struct PlainLoad {
    static __device__ __forceinline__ int32_t load(const int32_t* from) { return *from; }
};
struct RelaxedLoad {
    static __device__ __forceinline__ int32_t load(const int32_t* from) { return load_relaxed(from); }
};

// Valid keys of a sequence before the call, at most `most`.
template <class Numbers = PlainLoad>
__device__ __forceinline__ int cached_keys(const CacheParams& cache, int batch, int most) {
    const int given = cache.seqlens ? Numbers::load(cache.seqlens + batch) : cache.default_seqlen;
    return min(max(given, 0), most);
}
// Valid keys of a sequence before the call, including keys of other shards.
__device__ __forceinline__ int cached_keys(const DecodeParams& params, int batch) {
    return cached_keys(params.cache, batch, params.shard.most_keys);
}

// The number of keys of one sequence. With a shard of the keys, `length` counts all keys, `existing` only the keys of the shard.
struct KeyCount {
    int32_t length;    // with all new keys, even those that do not fit into the cache: positions count them
    int32_t existing;  // keys that fit into the cache: keys from here on are absent
    int32_t leftpad;

    template <class Numbers = PlainLoad>
    static __device__ __forceinline__ KeyCount of(const CacheParams& cache, int batch) {
        return of<Numbers>(cache, batch, cache.seqlen_new);
    }
    template <class Numbers = PlainLoad>
    static __device__ __forceinline__ KeyCount of(const CacheParams& cache, int batch, int news) {
        const int length = cached_keys<Numbers>(cache, batch, cache.capacity) + news;
        return {length, min(length, cache.capacity),
                cache.leftpad ? min(max(Numbers::load(cache.leftpad + batch), 0), length) : 0};
    }
};

struct KeyLocation {
    int32_t page;  // entry or page number; out of range: the key does not exist
    int32_t row;
};

// The locations of the keys of one sequence.
template <class Numbers>
struct KeyLocationsOf {
    const int32_t* table;
    int64_t column_stride;
    int32_t entry;
    Divisor page_size;

    __device__ __forceinline__ KeyLocationsOf(const CacheParams& cache, int batch)
        : table(cache.table ? cache.table + batch * cache.table_batch : nullptr), column_stride(cache.table_column),
          entry(cache.entries ? Numbers::load(cache.entries + batch) : batch), page_size(cache.page_size) {}

    // `key` must be a key of the sequence.
    __device__ __forceinline__ KeyLocation of(int key) const {
        if (!table) return {entry, key};
        const int column = divide(key, page_size);
        return {Numbers::load(table + column * column_stride), key - column * static_cast<int>(page_size.divisor)};
    }

    // of() in two steps: begin_lookup() copies the block table entry to `copy` in shared memory with cp.async; finish_lookup()
    // reads it after the caller has waited for the copy. A load into a register would not help: the compiler waits for the load
    // at once, to move the value to the register where the next iteration of the loop expects it.
    __device__ __forceinline__ void begin_lookup(int32_t* copy, int key) const {
        if (table) cp_async_4(shared_address(copy), table + divide(key, page_size) * column_stride);
    }
    __device__ __forceinline__ KeyLocation finish_lookup(const int32_t* copy, int key) const {
        if (!table) return {entry, key};
        return {*copy, key - divide(key, page_size) * static_cast<int>(page_size.divisor)};
    }
};

using KeyLocations = KeyLocationsOf<PlainLoad>;

// The keys that the query rows [first_row, last_row] see, and the part of them that belongs to this split.
struct VisibleKeys {
    int32_t length, existing, leftpad;  // of the sequence
    int32_t first, last;                // keys of this split: [first, last)
    int32_t plain, plain_end;           // keys that all of the rows see: [plain, plain_end)

    __device__ __forceinline__ VisibleKeys(const DecodeParams& p, KeyCount count, int first_row, int last_row, int split,
                                           int unit)
        : length(count.length), existing(count.existing), leftpad(count.leftpad) {
        plain = first_visible(p, last_row);
        plain_end = end_of_visible(p, first_row);
        take_split(p, first_visible(p, first_row), end_of_visible(p, last_row), split, unit);
    }

    // The part of the keys [begin, end) that belongs to this split.
    __device__ __forceinline__ void take_split(const DecodeParams& p, int begin, int end, int split, int unit) {
        if (p.split_size > 0) {
            first = static_cast<int>(min(int64_t{split} * p.split_size, int64_t{kUnboundedWindow}));
            last = first + p.split_size;
        } else {
            // Equal ranges of whole units, so that a key has the same row in its tile for every number of splits.
            const int start = begin / unit * unit;
            const int units = (max(end - start, 0) + unit - 1) / unit;
            const int size = divide(units + p.splits - 1, p.by_splits) * unit;
            first = static_cast<int>(min(start + int64_t{split} * size, int64_t{kUnboundedWindow}));
            last = first + size;
        }
        first = max(first, begin);
        last = min(last, end);
    }

    // The keys that a query row sees: [first_visible, end_of_visible). The rule is that of edge_mask.cuh, with padding on the
    // left and without keys that do not fit into the cache.
    __device__ __forceinline__ int first_visible(const DecodeParams& p, int row) const {
        return max(leftpad, row + length - p.seqlen_q - p.left);
    }
    __device__ __forceinline__ int end_of_visible(const DecodeParams& p, int row) const {
        return min(existing, row + length - p.seqlen_q + p.right + 1);
    }

protected:
    explicit __device__ __forceinline__ VisibleKeys(KeyCount count)
        : length(count.length), existing(count.existing), leftpad(count.leftpad) {}
};

}  // namespace libflash::cuda
