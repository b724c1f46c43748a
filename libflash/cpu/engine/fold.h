// Blocked summation over keys. A float sum over all keys of a long sequence loses one rounding error for each tile; with equal
// terms these errors have the same sign and become visible in a 16-bit result. So the row sum and the output of a query tile run
// over blocks of kSumBlockKeys keys. After each block they are added to totals and restart at zero.
//
// Block boundaries depend only on the positions of the keys. Sequences of at most kSumBlockKeys keys have no totals.
#pragma once

#include "cpu/engine/softmax.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kFoldKeys = 4096;

template <class A>
struct Folds {
    A *output = nullptr, *row_sum = nullptr, *row_max = nullptr;  // totals; nullptr if the sequence is too short
    bool any = false;                                             // whether the totals hold anything
    int64_t part = -1;                                            // number of the current block, key / kSumBlockKeys

    void lay_out(Arena& arena, int64_t most_keys, int64_t output_numbers) {
        if (most_keys <= kFoldKeys) return;
        output = arena.take<A>(output_numbers);
        row_sum = arena.take<A>(kPanelWidth);
        row_max = arena.take<A>(kPanelWidth);
    }
    void start() { any = false, part = -1; }

    // Whether a key tile that begins at `key` begins a new block.
    bool begins(int64_t key) {
        if (!output || key / kFoldKeys == part) return false;
        part = key / kFoldKeys;
        return true;
    }
};

// Adds the row sums to their totals. Leaves in softmax.rescale the factor of the output's totals, to be applied before the
// output is added. unit: see score_unit().
template <class A>
static void fold_row_sums(SoftmaxState<A>& softmax, Folds<A>& folds, int64_t width, A unit) {
    for (int64_t i = 0; i < width; i += kLanes<A>) {
        const Vec<A> top = load(softmax.row_max + i), sum = load(softmax.row_sum + i);
        const Vec<A> weight =
            folds.any ? exp2<A>((load(folds.row_max + i) - finite_maximum<A>(top)) * broadcast(unit)) : Vec<A>{};
        store(folds.row_sum + i, folds.any ? multiply_add(load(folds.row_sum + i), weight, sum) : sum);
        store(folds.row_max + i, top);
        store(softmax.row_sum + i, Vec<A>{});
        store(softmax.rescale + i, weight);
    }
}

// Adds the current block to the totals. The output is [channel][lane], or [row][channel] if `row_stride` is not 0.
template <class Panel, class A>
static void fold(Panel& panel, int64_t channels, int64_t row_stride, A unit) {
    Folds<A>& folds = panel.folds;
    fold_row_sums(panel.softmax, folds, panel.lanes.width, unit);
    const int64_t width = row_stride ? row_stride : panel.lanes.width, lines = row_stride ? panel.lanes.rows : channels;
    for (int64_t line = 0; line < lines; ++line)
        for (int64_t i = 0; i < width; i += kLanes<A>) {
            A* to = folds.output + line * width + i;
            const Vec<A> part = load(panel.o + line * width + i);
            const Vec<A> weight = row_stride ? broadcast(panel.softmax.rescale[line]) : load(panel.softmax.rescale + i);
            store(to, folds.any ? multiply_add(load(to), weight, part) : part);
        }
    folds.any = true;
    panel.empty = true;
}

// Called before a key tile that begins at `key`.
template <class Panel, class A>
FLASH_INLINE void fold_before(Panel& panel, int64_t key, int64_t channels, int64_t row_stride, A unit) {
    if (panel.folds.begins(key) && !panel.empty) fold(panel, channels, row_stride, unit);
}

// Called after the last key tile: moves the totals to the row sums and the output of the query tile.
template <class Panel, class A>
static void end_folds(Panel& panel, int64_t channels, int64_t row_stride, A unit) {
    if (!panel.folds.any) return;
    if (!panel.empty) fold(panel, channels, row_stride, unit);
    const int64_t numbers = row_stride ? panel.lanes.rows * row_stride : channels * panel.lanes.width;
    std::memcpy(panel.o, panel.folds.output, static_cast<size_t>(numbers) * sizeof(A));
    std::memcpy(panel.softmax.row_sum, panel.folds.row_sum, static_cast<size_t>(panel.lanes.width) * sizeof(A));
    panel.empty = false;
}

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
