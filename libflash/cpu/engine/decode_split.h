// Splits: ranges of keys that are processed independently ("split-KV"), and the combination of their partial results.
//
// The bounds of a split depend on the shape of the call and the length of the sequence; never on the capacity of the cache or
// the number of threads. With a fixed split_size every split but the last has split_size keys. With FLASH_FLAG_INVARIANT_ROWS the
// number of threads may decide whether there are splits.
#pragma once

#include "cpu/engine/attend.h"
#include "cpu/engine/decode_rows.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kDecodeTasks = 128;  // tasks to aim for: enough for many threads
constexpr int64_t kMinSplit = 512;     // keys; shorter splits do not justify the combination

FLASH_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Splits {
public:
    Splits() = default;
    // `tasks`: number of tasks without splits.
    Splits(const Request& request, int64_t tasks) : size_(request.split_size), wanted_(request.num_splits) {
        automatic_ = size_ == 0 && wanted_ == 0;
        if (automatic_) wanted_ = tasks > 0 && tasks < kDecodeTasks ? ceil_div(kDecodeTasks, tasks) : 1;
    }
    // One split for each segment of `size` keys, or one for all keys.
    static Splits of_segments(int64_t size, bool each) {
        Splits made;
        if (each) made.size_ = size;
        return made;
    }
    // The largest number of splits of a sequence with at most `capacity` keys.
    int64_t most(int64_t capacity) const {
        const int64_t shortest = size_ > 0 ? size_ : automatic_ ? kMinSplit : 1;
        const int64_t fitting = capacity > shortest ? ceil_div(capacity, shortest) : 1;
        return size_ > 0 || fitting < wanted_ ? fitting : wanted_;
    }
    KeyRange range(int64_t split, int64_t length) const {
        int64_t size = size_ > 0 ? size_ : ceil_div(length, wanted_);
        if (automatic_) size = wanted_ == 1 ? length : size < kMinSplit ? kMinSplit : round_up(size, FLASH_BLOCK_SIZE);
        const int64_t first = split * size, last = first + size;
        return {first, last < length ? last : length};
    }

private:
    int64_t size_ = 0, wanted_ = 1;
    bool automatic_ = false;
};

// Partial results: the softmax state and output of a query tile for one split.
template <class T>
struct Partials {
    using A = Acc<T>;
    A *row_max = nullptr, *row_sum = nullptr, *o = nullptr;
    int32_t* empty = nullptr;
    int64_t width = 0, elements = 0;  // lanes of a query tile; elements of its output

    void lay_out(Arena& arena, int64_t count, int64_t lanes, int64_t output_elements) {
        width = lanes, elements = output_elements;
        row_max = arena.allocate<A>(count * width);
        row_sum = arena.allocate<A>(count * width);
        o = arena.allocate<A>(count * elements);
        empty = arena.allocate<int32_t>(count);
    }
    // Makes the query tile use the memory of partial result `n`.
    void attach(QueryTile<T>& query_tile, int64_t n) const {
        query_tile.softmax.row_max = row_max + n * width;
        query_tile.softmax.row_sum = row_sum + n * width;
        query_tile.o = o + n * elements;
    }
};

// Combines row maxima and row sums of partial results n to n + splits - 1. Overwrites their row_max with their weights.
template <class T>
static void combine_sums(const Partials<T>& parts, int64_t n, int64_t splits, Acc<T> unit, QueryTile<T>& query_tile) {
    using A = Acc<T>;
    for (int64_t i = 0; i < query_tile.lanes.width; i += kLanes<A>) {
        Vec<A> top = broadcast<A>(-kInfinity<A>), sum{};
        for (int64_t s = n; s < n + splits; ++s)
            if (!parts.empty[s]) top = maximum(load(parts.row_max + s * parts.width + i), top);
        for (int64_t s = n; s < n + splits; ++s) {
            if (parts.empty[s]) continue;
            A* at = parts.row_max + s * parts.width + i;
            const Vec<A> weight = exp2<A>((load(at) - finite_maximum<A>(top)) * broadcast(unit));
            sum = multiply_add(weight, load(parts.row_sum + s * parts.width + i), sum);
            store(at, weight);
        }
        store(query_tile.softmax.row_max + i, top);
        store(query_tile.softmax.row_sum + i, sum);
    }
}

template <class A>
FLASH_INLINE void add_weighted(A* to, const A* from, Vec<A> weight, bool first) {
    const Vec<A> before = first ? Vec<A>{} : load(to);
    store(to, weight == 0 ? before : multiply_add(weight, load(from), before));
}

// Combines partial results n to n + splits - 1 into a query tile, whose output is [channel][lane]. A partial result without a key
// or with weight 0 adds nothing, even if it holds NaN. A single non-empty one is copied bit for bit.
template <class T>
static void combine(const Partials<T>& parts, int64_t n, int64_t splits, Acc<T> unit, int64_t channels,
                    QueryTile<T>& query_tile) {
    using A = Acc<T>;
    combine_sums(parts, n, splits, unit, query_tile);
    query_tile.empty = true;
    const int64_t width = query_tile.lanes.width;
    for (int64_t s = n; s < n + splits; ++s) {
        if (parts.empty[s]) continue;
        const A *from = parts.o + s * parts.elements, *weights = parts.row_max + s * parts.width;
        for (int64_t at = 0; at < channels * width; at += width)
            for (int64_t i = 0; i < width; i += kLanes<A>)
                add_weighted(query_tile.o + at + i, from + at + i, load(weights + i), query_tile.empty);
        query_tile.empty = false;
    }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
