// Blocked summation over keys. A float sum over all keys of a long sequence loses one rounding error for each tile; with equal
// terms these errors have the same sign and become visible in a 16-bit result. So the row sum and the output of a query tile run
// over blocks of kSumBlockKeys keys. After each block they are added to totals and restart at zero.
//
// Block boundaries depend only on the positions of the keys. Sequences of at most kSumBlockKeys keys have no totals.
#pragma once

#include "cpu/engine/softmax.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kSumBlockKeys = 4096;

template <class A>
struct BlockedSums {
    A *output = nullptr, *row_sum = nullptr, *row_max = nullptr;  // totals; nullptr if the sequence is too short
    bool any = false;                                             // whether the totals hold anything
    int64_t block = -1;                                           // number of the current block, key / kSumBlockKeys

    void lay_out(Arena& arena, int64_t most_keys, int64_t output_elements) {
        if (most_keys <= kSumBlockKeys) return;
        output = arena.allocate<A>(output_elements);
        row_sum = arena.allocate<A>(kQueryTileRows);
        row_max = arena.allocate<A>(kQueryTileRows);
    }
    void start() { any = false, block = -1; }

    // Whether a key tile that begins at `key` begins a new block.
    bool begins_block(int64_t key) {
        if (!output || key / kSumBlockKeys == block) return false;
        block = key / kSumBlockKeys;
        return true;
    }
};

// Adds the row sums to their totals. Leaves in softmax.rescale the factor of the output's totals, to be applied before the
// output is added. unit: see score_unit().
template <class A>
static void add_row_sums_to_totals(SoftmaxState<A>& softmax, BlockedSums<A>& totals, int64_t width, A unit) {
    for (int64_t i = 0; i < width; i += kLanes<A>) {
        const Vec<A> top = load(softmax.row_max + i), sum = load(softmax.row_sum + i);
        const Vec<A> weight =
            totals.any ? exp2<A>((load(totals.row_max + i) - finite_maximum<A>(top)) * broadcast(unit)) : Vec<A>{};
        store(totals.row_sum + i, totals.any ? multiply_add(load(totals.row_sum + i), weight, sum) : sum);
        store(totals.row_max + i, top);
        store(softmax.row_sum + i, Vec<A>{});
        store(softmax.rescale + i, weight);
    }
}

// Adds the current block to the totals. The output is [channel][lane], or [row][channel] if `row_stride` is not 0.
template <class Tile, class A>
static void add_to_totals(Tile& query_tile, int64_t channels, int64_t row_stride, A unit) {
    BlockedSums<A>& totals = query_tile.totals;
    add_row_sums_to_totals(query_tile.softmax, totals, query_tile.lanes.width, unit);
    const int64_t width = row_stride ? row_stride : query_tile.lanes.width, lines = row_stride ? query_tile.lanes.rows : channels;
    for (int64_t line = 0; line < lines; ++line)
        for (int64_t i = 0; i < width; i += kLanes<A>) {
            A* to = totals.output + line * width + i;
            const Vec<A> sum = load(query_tile.o + line * width + i);
            const Vec<A> weight = row_stride ? broadcast(query_tile.softmax.rescale[line]) : load(query_tile.softmax.rescale + i);
            store(to, totals.any ? multiply_add(load(to), weight, sum) : sum);
        }
    totals.any = true;
    query_tile.empty = true;
}

// Called before a key tile that begins at `key`.
template <class Tile, class A>
FLASH_INLINE void add_finished_block(Tile& query_tile, int64_t key, int64_t channels, int64_t row_stride, A unit) {
    if (query_tile.totals.begins_block(key) && !query_tile.empty) add_to_totals(query_tile, channels, row_stride, unit);
}

// Called after the last key tile: moves the totals to the row sums and the output of the query tile.
template <class Tile, class A>
static void finish_totals(Tile& query_tile, int64_t channels, int64_t row_stride, A unit) {
    if (!query_tile.totals.any) return;
    if (!query_tile.empty) add_to_totals(query_tile, channels, row_stride, unit);
    const int64_t elements = row_stride ? query_tile.lanes.rows * row_stride : channels * query_tile.lanes.width;
    std::memcpy(query_tile.o, query_tile.totals.output, static_cast<size_t>(elements) * sizeof(A));
    std::memcpy(query_tile.softmax.row_sum, query_tile.totals.row_sum, static_cast<size_t>(query_tile.lanes.width) * sizeof(A));
    query_tile.empty = false;
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
