// The sizes of a decode call and the layout of its workspace.
#pragma once

#include "cpu/engine/decode_parts.h"
#include "cpu/engine/decode_small_q.h"
#include "cpu/engine/decode_split.h"
#include "cpu/engine/planning.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kDecodeKeys = 128;  // keys of a tile

struct DecodeSizes {
    HeadDims dims;
    KeyParts parts;
    int64_t rows = 0;             // query rows of one key head: all heads of the group, all positions
    int64_t query_tiles = 0;      // query tiles of one key head
    int64_t width = 0;            // lanes of a query tile, whole vectors
    int64_t all_query_tiles = 0;  // query tiles of the whole problem
    Splits ranges;
    int64_t splits = 1;
    // Not 0 for small query counts: then the output is [row][channel] with this stride, else [channel][lane].
    int64_t row_stride = 0;
    int64_t heads_per_task = 1;  // for small query counts: key heads of one task

    bool small_q() const { return row_stride > 0; }
    int64_t output_elements() const { return small_q() ? rows * row_stride : width * dims.v; }
    int64_t tasks_of_split(const DecodeProblem& problem) const {
        return small_q() ? ceil_div(problem.heads_k, heads_per_task) : problem.heads_k * query_tiles;
    }
    int64_t tasks(const DecodeProblem& problem) const { return problem.batch * splits * tasks_of_split(problem); }
};

// How many key heads a task processes: all heads that are contiguous in the cache, fewer if threads would be idle. Results do
// not depend on it.
FLASH_INLINE int64_t choose_heads_per_task(const DecodeProblem& problem, int64_t splits, int64_t threads) {
    const TensorView &k = problem.cache.k, &v = problem.cache.v;
    const auto contiguous = [&](const TensorView& t) { return t.stride[2] * problem.heads_k <= t.stride[1] || t.shape[1] == 1; };
    if (!contiguous(k) || !contiguous(v)) return 1;
    int64_t heads = problem.heads_k;
    while (heads > 1 && problem.batch * splits * ceil_div(problem.heads_k, heads) < 4 * threads) heads = ceil_div(heads, 2);
    return heads > 0 ? heads : 1;
}

template <class T>
static DecodeSizes decode_sizes(const DecodeProblem& problem, int threads) {
    DecodeSizes sizes;
    sizes.dims = {problem.head_dim, problem.head_dim_v};
    sizes.parts = KeyParts(problem.cache);
    sizes.rows = problem.group_size() * problem.seqlen_q;
    sizes.query_tiles = ceil_div(sizes.rows, kQueryTileRows);
    sizes.width = round_up(sizes.rows < kQueryTileRows ? sizes.rows : kQueryTileRows, kLanes<Acc<T>>);
    sizes.all_query_tiles = problem.batch * problem.heads_k * sizes.query_tiles;
    if (sizes.rows <= kSmallQRows) sizes.row_stride = small_q_stride<T>(sizes.parts);
    sizes.ranges = Splits(problem.request, sizes.small_q() ? problem.batch : sizes.all_query_tiles);
    sizes.splits = sizes.ranges.most(problem.cache.capacity);
    if (sizes.small_q()) sizes.heads_per_task = choose_heads_per_task(problem, sizes.splits, threads);
    return sizes;
}

// Scratch memory of one thread.
template <class T>
struct DecodeScratch {
    QueryTile<T> query_tile;  // for small query counts: only to combine partial results
    KeyTileScratch<T> keys;
    TileScratch<T> tile;
    SmallQScratch<T> small_q;
    Acc<T>* lse = nullptr;
    double* sinks = nullptr;

    void lay_out(Arena& arena, const DecodeSizes& sizes, int64_t most_keys) {
        lse = arena.allocate<Acc<T>>(kQueryTileRows);
        sinks = arena.allocate<double>(kQueryTileRows);
        if (sizes.small_q()) {
            query_tile.lanes.lay_out(arena);
            query_tile.softmax.lay_out(arena);
            query_tile.o = arena.allocate<Acc<T>>(sizes.output_elements());
            small_q.lay_out(arena, sizes.parts, most_keys, sizes.heads_per_task, sizes.rows);
        } else {
            query_tile.lay_out(arena, {query_elements<T>(sizes.parts) * kValuesPerElement<T>, sizes.dims.v}, most_keys);
            keys.lay_out(arena, sizes.dims, kDecodeKeys);
            tile.lay_out(arena, kDecodeKeys, !sizes.parts.plain);
        }
    }
};

// The whole workspace: rotated queries, partial results, then the scratch memory of each thread.
template <class T>
struct DecodeMemory {
    T* rotated = nullptr;
    Partials<T> partials;
    int32_t* finished = nullptr;  // number of finished splits of each query tile
    char* scratch_memory = nullptr;
    int64_t most_keys = 0;  // upper bound for a sequence
    size_t scratch_bytes = 0, bytes = 0;

    DecodeMemory(const DecodeProblem& problem, const DecodeSizes& sizes, int threads, void* workspace) {
        Arena arena(workspace);
        if (problem.rotary_cos.present)
            rotated = arena.allocate<T>(problem.batch * problem.seqlen_q * problem.heads_q * problem.head_dim);
        if (sizes.splits > 1) {
            partials.lay_out(arena, sizes.all_query_tiles * sizes.splits, sizes.width, sizes.output_elements());
            finished = arena.allocate<int32_t>(sizes.all_query_tiles);
        }
        Arena one(nullptr);
        most_keys = problem.cache.capacity;
        DecodeScratch<T>().lay_out(one, sizes, most_keys);
        scratch_bytes = one.used();
        scratch_memory = arena.allocate<char>(static_cast<int64_t>(scratch_bytes) * threads);
        bytes = arena.used();
    }
    DecodeScratch<T> scratch(int thread, const DecodeSizes& sizes) const {
        Arena arena(scratch_memory + scratch_bytes * static_cast<size_t>(thread));
        DecodeScratch<T> scratch;
        scratch.lay_out(arena, sizes, most_keys);
        return scratch;
    }
};

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
