// Rows of decode: the query rows of a group of heads as rows of one matrix, and cached keys, contiguous or paged.
#pragma once

#include "cpu/engine/problem_rows.h"
#include "problem/decode.h"
#include "problem/sequence_keys.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

// The query rows of one sequence that share a key head: row n is row n / group of query head n % group of the group.
template <class T>
struct GroupRows {
    static constexpr bool kStrided = false;
    T* data = nullptr;
    int64_t position_stride = 0, head_stride = 0, group = 1;
    int64_t first = 0;  // offset added to n
    FLASH_INLINE T* operator()(int64_t n) const {
        return data + (first + n) / group * position_stride + (first + n) % group * head_stride;
    }
};

// Cached rows of one key head of one sequence, through the block table.
template <class T>
struct PagedRows {
    static constexpr bool kStrided = false;
    T* data = nullptr;
    int64_t page_stride = 0, row_stride = 0;
    const int32_t* table = nullptr;
    int64_t table_step = 0, page_size = 1;
    FLASH_INLINE T* operator()(int64_t row) const {
        const auto column = static_cast<uint32_t>(row) / static_cast<uint32_t>(page_size);
        return data + table[column * table_step] * page_stride + (row - column * page_size) * row_stride;
    }
};

// The addresses of `count` consecutive rows.
template <class T>
static void find_rows(const StridedRows<T>& rows, int64_t first, int64_t count, T** to) {
    for (int64_t n = 0; n < count; ++n) to[n] = rows(first + n);
}
template <class T>
static void find_rows(const PagedRows<T>& rows, int64_t first, int64_t count, T** to) {
    for (int64_t n = 0; n < count;) {
        const int64_t left = rows.page_size - (first + n) % rows.page_size, end = n + left < count ? n + left : count;
        for (T* at = rows(first + n); n < end; at += rows.row_stride) to[n++] = at;
    }
}
// Whether all rows have the same address.
template <class T>
FLASH_INLINE bool are_one_row(const StridedRows<T>& rows) {
    return rows.stride == 0;
}
template <class T>
FLASH_INLINE bool are_one_row(const PagedRows<T>& rows) {
    return rows.page_stride == 0 && rows.row_stride == 0;
}

template <class T>
FLASH_INLINE StridedRows<const T> entry_rows(const DecodeProblem& problem, const TensorView& cache, int64_t batch, int64_t head) {
    const int64_t entry = problem.cache.batch_idx ? problem.cache.batch_idx[batch] : batch;
    return {static_cast<const T*>(cache.data) + entry * cache.stride[0] + head * cache.stride[2], cache.stride[1]};
}

// Rows [row0, row0 + rows) of the group of `key_head`, restricted to keys [range.first, range.last).
template <class A>
static void set_lanes(Lanes<A>& lanes, const DecodeProblem& problem, const SequenceKeys& keys, int64_t batch, int64_t key_head,
                      int64_t row0, int64_t rows, KeyRange range) {
    const int64_t group = problem.group_size();
    lanes.resize(rows);
    lanes.row0 = row0;
    for (int64_t n = 0; n < rows; ++n) {
        const int64_t position = (row0 + n) / group, head = key_head * group + (row0 + n) % group;
        const auto [first, last] = keys.range(position);
        lanes.first_key[n] = static_cast<Integer<A>>(first > range.first ? first : range.first);
        lanes.last_key[n] = static_cast<Integer<A>>(last < range.first ? range.first : last < range.last ? last : range.last);
        if (!problem.alibi_slopes.present) continue;
        lanes.alibi_position[n] = static_cast<A>(keys.position(position));
        lanes.alibi_slope[n] = static_cast<A>(head_value(problem.alibi_slopes, batch, head));
    }
    lanes.set_ranges();
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
