// Ranges of keys that are attended to apart ("split-KV"), and how their partial results become one.
//
// Where a range begins and ends depends on the shape of the call and on the sequence's own length; never on the capacity of the
// cache or on the number of threads, and with a fixed split_size on nothing but the position of the keys.
#pragma once

#include "cpu/engine/attend.h"
#include "cpu/engine/decode_rows.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kDecodeItems = 128;   // pieces of work to aim for: enough for many threads
constexpr int64_t kShortestSplit = 256;  // keys; fewer are not worth putting together again

FLASH_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Splits {
public:
    Splits(const DecodeProblem& problem, int64_t panels) : size_(problem.request.split_size), wanted_(problem.request.num_splits) {
        automatic_ = size_ == 0 && wanted_ == 0;
        const int64_t items = problem.batch * problem.heads_k * panels;
        if (automatic_) wanted_ = items > 0 && items < kDecodeItems ? ceil_div(kDecodeItems, items) : 1;
    }
    // No sequence of at most `capacity` keys has more.
    int64_t most(int64_t capacity) const {
        const int64_t shortest = size_ > 0 ? size_ : automatic_ ? kShortestSplit : 1;
        const int64_t fitting = capacity > shortest ? ceil_div(capacity, shortest) : 1;
        return size_ > 0 || fitting < wanted_ ? fitting : wanted_;
    }
    KeyRange range(int64_t split, int64_t length) const {
        int64_t size = size_ > 0 ? size_ : ceil_div(length, wanted_);
        if (automatic_) size = wanted_ == 1 ? length : size < kShortestSplit ? kShortestSplit : round_up(size, FLASH_BLOCK_SIZE);
        const int64_t first = split * size, last = first + size;
        return {first, last < length ? last : length};
    }

private:
    int64_t size_, wanted_;
    bool automatic_;
};

// The state of a panel after one range of keys; `width` lanes each.
template <class T>
struct Partials {
    using A = Acc<T>;
    A *row_max = nullptr, *row_sum = nullptr, *o = nullptr;
    int32_t* empty = nullptr;
    int64_t width = 0, channels = 0;

    void lay_out(Arena& arena, int64_t count, int64_t lanes, int64_t dim_v) {
        width = lanes, channels = dim_v;
        row_max = arena.take<A>(count * width);
        row_sum = arena.take<A>(count * width);
        o = arena.take<A>(count * width * channels);
        empty = arena.take<int32_t>(count);
    }
    // Makes the panel keep its state in partial `n`.
    void lend(QueryPanel<T>& panel, int64_t n) const {
        panel.softmax.row_max = row_max + n * width;
        panel.softmax.row_sum = row_sum + n * width;
        panel.o = o + n * width * channels;
    }
};

// Partials n to n + splits - 1 into the panel. A part without a key, or of no weight, adds nothing whatever it holds; a single part comes
// out bit for bit as if nothing had been split.
template <class T>
static void combine(const Partials<T>& parts, int64_t n, int64_t splits, Acc<T> unit, QueryPanel<T>& panel) {
    using A = Acc<T>;
    constexpr int L = kLanes<A>;
    const int64_t width = panel.lanes.width;
    for (int64_t i = 0; i < width; i += L) {
        Vec<A> top = broadcast<A>(-kInfinity<A>), sum{};
        for (int64_t s = n; s < n + splits; ++s)
            if (!parts.empty[s]) top = maximum(load(parts.row_max + s * parts.width + i), top);
        for (int64_t s = n; s < n + splits; ++s) {
            if (parts.empty[s]) continue;
            A* at = parts.row_max + s * parts.width + i;
            const Vec<A> weight = exp2<A>((load(at) - finite_maximum<A>(top)) * broadcast(unit));
            sum += weight * load(parts.row_sum + s * parts.width + i);
            store(at, weight);
        }
        store(panel.softmax.row_max + i, top);
        store(panel.softmax.row_sum + i, sum);
    }
    panel.empty = true;
    for (int64_t s = n; s < n + splits; ++s) {
        if (parts.empty[s]) continue;
        const A* from = parts.o + s * parts.width * parts.channels;
        for (int64_t c = 0; c < parts.channels; ++c)
            for (int64_t i = 0; i < width; i += L) {
                const Vec<A> weight = load(parts.row_max + s * parts.width + i), o = load(from + c * width + i);
                const Vec<A> part = weight == 0 ? Vec<A>{} : weight * o;
                A* to = panel.o + c * width + i;
                store(to, panel.empty ? part : load(to) + part);
            }
        panel.empty = false;
    }
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
