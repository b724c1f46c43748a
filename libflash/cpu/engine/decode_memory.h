// The sizes of a decode call and the layout of its workspace.
#pragma once

#include "cpu/engine/decode_few.h"
#include "cpu/engine/decode_rows.h"
#include "cpu/engine/decode_split.h"
#include "cpu/engine/work.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kDecodeKeys = 128;  // keys of a tile

struct DecodeSizes {
    HeadDims dims;
    int64_t rows = 0;    // query rows of one key head: all heads of the group, all positions
    int64_t panels = 0;  // query tiles of one key head
    int64_t width = 0;   // lanes of a query tile, whole vectors
    int64_t groups = 0;  // query tiles of the whole problem
    Splits ranges;
    int64_t splits = 1;
    // Not 0 for small query counts: then the output is [row][channel] with this stride, else [channel][lane].
    int64_t row_stride = 0;
    int64_t heads_together = 1;  // for small query counts: key heads of one task

    bool few() const { return row_stride > 0; }
    int64_t panel_numbers() const { return few() ? rows * row_stride : width * dims.v; }
    int64_t items_of_range(const DecodeProblem& problem) const {
        return few() ? ceil_div(problem.heads_k, heads_together) : problem.heads_k * panels;
    }
    int64_t items(const DecodeProblem& problem) const { return problem.batch * splits * items_of_range(problem); }
};

// How many key heads a task processes: all heads that are contiguous in the cache, fewer if threads would be idle. Results do
// not depend on it.
FLASH_INLINE int64_t choose_heads_together(const DecodeProblem& problem, int64_t splits, int64_t threads) {
    const TensorView &k = problem.cache.k, &v = problem.cache.v;
    const auto side_by_side = [&](const TensorView& t) {
        return t.stride[2] * problem.heads_k <= t.stride[1] || t.shape[1] == 1;
    };
    if (!side_by_side(k) || !side_by_side(v)) return 1;
    int64_t heads = problem.heads_k;
    while (heads > 1 && problem.batch * splits * ceil_div(problem.heads_k, heads) < 4 * threads) heads = ceil_div(heads, 2);
    return heads > 0 ? heads : 1;
}

template <class T>
static DecodeSizes decode_sizes(const DecodeProblem& problem, int threads) {
    DecodeSizes sizes;
    sizes.dims = {problem.head_dim, problem.head_dim_v};
    sizes.rows = problem.group_size() * problem.seqlen_q;
    sizes.panels = ceil_div(sizes.rows, kPanelWidth);
    sizes.width = round_up(sizes.rows < kPanelWidth ? sizes.rows : kPanelWidth, kLanes<Acc<T>>);
    sizes.groups = problem.batch * problem.heads_k * sizes.panels;
    if (sizes.rows <= kFewRows) sizes.row_stride = few_stride<T>(sizes.dims.v);
    sizes.ranges = Splits(problem.request, sizes.few() ? problem.batch : sizes.groups);
    sizes.splits = sizes.ranges.most(problem.cache.capacity);
    if (sizes.few()) sizes.heads_together = choose_heads_together(problem, sizes.splits, threads);
    return sizes;
}

// Scratch memory of one thread.
template <class T>
struct DecodeRoom {
    QueryPanel<T> panel;  // for small query counts: only to combine partial results
    KeyTileRoom<T> keys;
    TileRoom<T> tile;
    FewRoom<T> few;
    Acc<T>* lse = nullptr;
    double* sinks = nullptr;

    void lay_out(Arena& arena, const DecodeSizes& sizes, int64_t most_keys) {
        lse = arena.take<Acc<T>>(kPanelWidth);
        sinks = arena.take<double>(kPanelWidth);
        if (sizes.few()) {
            panel.lanes.lay_out(arena);
            panel.softmax.lay_out(arena);
            panel.o = arena.take<Acc<T>>(sizes.panel_numbers());
            few.lay_out(arena, sizes.dims, most_keys, sizes.heads_together, sizes.rows);
        } else {
            panel.lay_out(arena, sizes.dims, most_keys);
            keys.lay_out(arena, sizes.dims, kDecodeKeys);
            tile.lay_out(arena, kDecodeKeys, false);
        }
    }
};

// The whole workspace: rotated queries, partial results, then the scratch memory of each thread.
template <class T>
struct DecodeMemory {
    T* turned = nullptr;
    Partials<T> partials;
    int32_t* finished = nullptr;  // number of finished splits of each query tile
    char* rooms = nullptr;
    int64_t most_keys = 0;  // upper bound for a sequence
    size_t room_bytes = 0, bytes = 0;

    DecodeMemory(const DecodeProblem& problem, const DecodeSizes& sizes, int threads, void* workspace) {
        Arena arena(workspace);
        if (problem.rotary_cos.present)
            turned = arena.take<T>(problem.batch * problem.seqlen_q * problem.heads_q * problem.head_dim);
        if (sizes.splits > 1) {
            partials.lay_out(arena, sizes.groups * sizes.splits, sizes.width, sizes.panel_numbers());
            finished = arena.take<int32_t>(sizes.groups);
        }
        Arena one(nullptr);
        most_keys = problem.cache.capacity;
        DecodeRoom<T>().lay_out(one, sizes, most_keys);
        room_bytes = one.used();
        rooms = arena.take<char>(static_cast<int64_t>(room_bytes) * threads);
        bytes = arena.used();
    }
    DecodeRoom<T> room(int thread, const DecodeSizes& sizes) const {
        Arena arena(rooms + room_bytes * static_cast<size_t>(thread));
        DecodeRoom<T> room;
        room.lay_out(arena, sizes, most_keys);
        return room;
    }
};

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
