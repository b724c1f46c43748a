// Long sums in parts. A sum in single precision over all keys of a long sequence is rounded once for each tile. With equal terms
// these errors have one sign, and at 2^20 keys they would show in a 16-bit result. So the row sum and the output of a panel run
// over kFoldKeys keys only. Then they are added to the totals of the keys before them, and start again from zero.
//
// Where a fold comes depends on the positions of the keys alone. Sequences of at most kFoldKeys keys have none.
#pragma once

#include "cpu/engine/softmax.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kFoldKeys = 4096;

template <class A>
struct Folds {
    A *output = nullptr, *row_sum = nullptr, *row_max = nullptr;  // totals; nullptr: the sequence is too short to fold
    bool any = false;                                             // so far
    int64_t part = -1;                                            // key / kFoldKeys of the last tile

    void lay_out(Arena& arena, int64_t most_keys, int64_t output_numbers) {
        if (most_keys <= kFoldKeys) return;
        output = arena.take<A>(output_numbers);
        row_sum = arena.take<A>(kPanelWidth);
        row_max = arena.take<A>(kPanelWidth);
    }
    void start() { any = false, part = -1; }

    // Does a tile that begins with `key` begin a new part?
    bool begins(int64_t key) {
        if (!output || key / kFoldKeys == part) return false;
        part = key / kFoldKeys;
        return true;
    }
};

// Adds the row sums to their totals. Leaves in softmax.rescale what the totals of the output are to be multiplied by before the
// output is added to them. unit: from scores to powers of two.
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

// The part so far into the totals. The output is [channel][lane], or with `row_stride` [row][channel].
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

// Before a tile that begins with `key`.
template <class Panel, class A>
FLASH_INLINE void fold_before(Panel& panel, int64_t key, int64_t channels, int64_t row_stride, A unit) {
    if (panel.folds.begins(key) && !panel.empty) fold(panel, channels, row_stride, unit);
}

// After the last tile: the totals become the row sums and the output of the panel.
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
