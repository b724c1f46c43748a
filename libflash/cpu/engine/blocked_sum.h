// Blocked summation over keys. A float sum over all keys of a long sequence loses one rounding error for each tile; with equal
// terms these errors have the same sign and become visible in a 16-bit result. So the row sum and the output of a query tile run
// over blocks of kSumBlockKeys keys. After each block they are added to totals and restart at zero.
//
// Block boundaries depend only on the indices of the keys. Sequences of at most kSumBlockKeys keys have no totals.
#pragma once

#include "cpu/engine/softmax.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kSumBlockKeys = 4096;

template <class A>
struct BlockedSums {
    A *output = nullptr, *row_sum = nullptr, *row_max = nullptr;  // totals; nullptr if the sequence is too short
    A* exponent_sum = nullptr;                                    // the same; nullptr without entropy
    bool any = false;                                             // whether the totals hold anything
    int64_t block = -1;                                           // number of the current block, key / kSumBlockKeys

    void lay_out(Arena& arena, int64_t most_keys, int64_t output_elements, int64_t keys_of_block = kSumBlockKeys,
                 bool entropy = false) {
        if (most_keys <= keys_of_block) return;
        output = arena.allocate<A>(output_elements);
        row_sum = arena.allocate<A>(kQueryTileRows);
        row_max = arena.allocate<A>(kQueryTileRows);
        if (entropy) exponent_sum = arena.allocate<A>(kQueryTileRows);
    }
    void start() { any = false, block = -1; }

    // Whether a key tile that begins at `key` begins a new block.
    bool begins_block(int64_t key) {
        if (!output || key / kSumBlockKeys == block) return false;
        block = key / kSumBlockKeys;
        return true;
    }
};

// Adds the exponent sums of the vector of lanes that begins at lane i to their totals, which are first scaled by
// weight = 2^change. Call it before the row sums are added: it needs the totals of the row sums without the current block.
template <class A>
FLASH_INLINE void add_exponent_sums_to_totals(SoftmaxState<A>& softmax, BlockedSums<A>& totals, int64_t i, Vec<A> change,
                                              Vec<A> weight) {
    Vec<A> sum = load(softmax.exponent_sum + i);
    if (totals.any) {
        const Vec<A> earlier = moved_exponent_sum<A>(load(totals.exponent_sum + i), load(totals.row_sum + i), change);
        sum = multiply_add(earlier, weight, sum);
    }
    store(totals.exponent_sum + i, sum);
    store(softmax.exponent_sum + i, Vec<A>{});
}

// Adds the row sums to their totals. Leaves in softmax.rescale the factor by which the totals of the output must be multiplied
// before the output is added. unit: see score_unit().
template <class A>
static void add_row_sums_to_totals(SoftmaxState<A>& softmax, BlockedSums<A>& totals, int64_t width, A unit) {
    for (int64_t i = 0; i < width; i += kLanes<A>) {
        const Vec<A> top = load(softmax.row_max + i), sum = load(softmax.row_sum + i);
        const Vec<A> change =
            totals.any ? (load(totals.row_max + i) - finite_maximum<A>(top)) * broadcast(unit) : broadcast<A>(-kInfinity<A>);
        const Vec<A> weight = exp2<A>(change);
        if (softmax.exponent_sum) add_exponent_sums_to_totals(softmax, totals, i, change, weight);
        store(totals.row_sum + i, totals.any ? multiply_add(load(totals.row_sum + i), weight, sum) : sum);
        store(totals.row_max + i, top);
        store(softmax.row_sum + i, Vec<A>{});
        store(softmax.rescale + i, weight);
    }
}

// Adds the current block to the totals. The output is [channel][lane].
template <class Tile, class A>
static void add_to_totals(Tile& query_tile, int64_t channels, A unit) {
    BlockedSums<A>& totals = query_tile.totals;
    add_row_sums_to_totals(query_tile.softmax, totals, query_tile.lanes.width, unit);
    const int64_t width = query_tile.lanes.width;
    for (int64_t line = 0; line < channels; ++line)
        for (int64_t i = 0; i < width; i += kLanes<A>) {
            A* to = totals.output + line * width + i;
            const Vec<A> sum = load(query_tile.o + line * width + i);
            const Vec<A> weight = load(query_tile.softmax.rescale + i);
            store(to, totals.any ? multiply_add(load(to), weight, sum) : sum);
        }
    totals.any = true;
    query_tile.empty = true;
}

// Called before a key tile that begins at `key`.
template <class Tile, class A>
FLASH_INLINE void add_finished_block(Tile& query_tile, int64_t key, int64_t channels, A unit) {
    if (query_tile.totals.begins_block(key) && !query_tile.empty) add_to_totals(query_tile, channels, unit);
}

// Called after the last key tile: moves the totals to the row sums and the output of the query tile.
template <class Tile, class A>
static void finish_totals(Tile& query_tile, int64_t channels, A unit) {
    if (!query_tile.totals.any) return;
    if (!query_tile.empty) add_to_totals(query_tile, channels, unit);
    const int64_t elements = channels * query_tile.lanes.width;
    std::memcpy(query_tile.o, query_tile.totals.output, static_cast<size_t>(elements) * sizeof(A));
    const size_t bytes = static_cast<size_t>(query_tile.lanes.width) * sizeof(A);
    std::memcpy(query_tile.softmax.row_sum, query_tile.totals.row_sum, bytes);
    if (query_tile.softmax.exponent_sum) std::memcpy(query_tile.softmax.exponent_sum, query_tile.totals.exponent_sum, bytes);
    query_tile.empty = false;
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
