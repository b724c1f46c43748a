// The sizes of a decode call and the layout of its workspace.
#pragma once

#include "cpu/engine/decode_parts.h"
#include "cpu/engine/decode_small_q.h"
#include "cpu/engine/decode_split.h"
#include "cpu/engine/planning.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kDecodeKeys = 128;  // keys of a tile

// A row block: `rows` of the rows that share a key head in one sequence, from row `row0` on. See GroupRows for their order.
struct RowBlock {
    int64_t batch = 0, row0 = 0, rows = 0;
};

// The sizes of one part of a call: the sequences with at most kSmallQRows rows per key head (few_rows), or the others. A dense
// call has one part. All sizes follow from shapes; in a packed call they are upper bounds.
struct DecodeSizes {
    bool few_rows = false;
    HeadDims dims;
    KeyParts parts;
    int64_t rows_of_sequence = 0;  // dense: query rows of one key head of each sequence
    int64_t block_rows = 0;        // rows of a full row block
    int64_t most_rows = 0;         // rows of the largest row block
    int64_t blocks = 0;            // row blocks of one key head
    int64_t width = 0;             // lanes of a query tile, whole vectors
    Splits ranges;
    int64_t splits = 1;
    // Not 0 if vectors run along the channels: then the output is [row][channel] with this stride, else [channel][lane].
    int64_t row_stride = 0;
    int64_t segment = 0;         // with vectors along the channels: keys of a segment
    int64_t heads_per_task = 1;  // for few rows: key heads of one task

    bool small_q() const { return row_stride > 0; }
    int64_t output_elements() const { return small_q() ? most_rows * row_stride : width * dims.v; }
    int64_t head_tasks(const DecodeProblem& problem) const { return ceil_div(problem.heads_k, heads_per_task); }
    int64_t tasks(const DecodeProblem& problem) const { return blocks * splits * head_tasks(problem); }
    // Row block `n` of a dense call.
    RowBlock block(int64_t n) const {
        const int64_t tiles = ceil_div(rows_of_sequence, block_rows), row0 = n % tiles * block_rows;
        const int64_t left = rows_of_sequence - row0;
        return {n / tiles, row0, left < block_rows ? left : block_rows};
    }
};

// How many key heads a task processes: all heads that are contiguous in the cache, fewer if threads would be idle. Results do
// not depend on it.
FLASH_INLINE int64_t choose_heads_per_task(const DecodeProblem& problem, int64_t tasks, int64_t threads) {
    const TensorView &k = problem.cache.k, &v = problem.cache.v;
    const auto contiguous = [&](const TensorView& t) { return t.stride[2] * problem.heads_k <= t.stride[1] || t.shape[1] == 1; };
    if (!contiguous(k) || !contiguous(v)) return 1;
    int64_t heads = problem.heads_k;
    while (heads > 1 && tasks * ceil_div(problem.heads_k, heads) < 4 * threads) heads = ceil_div(heads, 2);
    return heads > 0 ? heads : 1;
}

FLASH_INLINE void count_rows_of_dense(DecodeSizes& sizes, const DecodeProblem& problem) {
    const int64_t rows = problem.group_size() * problem.seqlen_q;
    sizes.rows_of_sequence = rows;
    if (sizes.few_rows != (rows <= kSmallQRows)) return;
    sizes.most_rows = rows < sizes.block_rows ? rows : sizes.block_rows;
    sizes.blocks = problem.batch * ceil_div(rows, sizes.block_rows);
}

FLASH_INLINE void count_rows_of_packed(DecodeSizes& sizes, const DecodeProblem& problem) {
    const int64_t rows = problem.group_size() * problem.seqlen_q;
    const int64_t least = sizes.few_rows ? 1 : kSmallQRows + 1;  // rows of a sequence of this part
    const int64_t sequences = problem.batch < rows / least ? problem.batch : rows / least;
    sizes.most_rows = rows < sizes.block_rows ? rows : sizes.block_rows;
    sizes.blocks = sizes.few_rows ? sequences : rows / sizes.block_rows + sequences;
    if (sequences == 0) sizes.blocks = 0;
}

// With FLASH_FLAG_INVARIANT_ROWS a split is a segment, or there is one split for all keys. The results have the same bits.
FLASH_INLINE void choose_splits(DecodeSizes& sizes, const DecodeProblem& problem, int threads) {
    sizes.segment = kSumBlockKeys;
    if (problem.invariant_rows) {
        sizes.segment = problem.request.split_size > 0 ? problem.request.split_size : kInvariantSegment;
        const int64_t tasks = sizes.few_rows ? sizes.blocks : sizes.blocks * problem.heads_k;
        sizes.ranges = Splits::of_segments(sizes.segment, tasks < 4 * threads);
    } else {
        sizes.ranges = Splits(problem.request, sizes.few_rows ? problem.batch : sizes.blocks * problem.heads_k);
    }
    if (sizes.blocks > 0) sizes.splits = sizes.ranges.most(problem.cache.capacity);
}

template <class T>
static DecodeSizes decode_sizes(const DecodeProblem& problem, bool few_rows, int threads) {
    DecodeSizes sizes;
    sizes.dims = {problem.head_dim, problem.head_dim_v};
    sizes.parts = KeyParts(problem.cache);
    sizes.few_rows = few_rows;
    sizes.block_rows = few_rows ? kSmallQRows : problem.invariant_rows ? kInvariantRows : kQueryTileRows;
    if (problem.q_rows.packed())
        count_rows_of_packed(sizes, problem);
    else
        count_rows_of_dense(sizes, problem);
    sizes.width = round_up(sizes.most_rows, kLanes<Acc<T>>);
    if (few_rows || problem.invariant_rows) sizes.row_stride = small_q_stride<T>(sizes.parts);
    choose_splits(sizes, problem, threads);
    if (few_rows) sizes.heads_per_task = choose_heads_per_task(problem, sizes.blocks * sizes.splits, threads);
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
            small_q.lay_out(arena, sizes.parts, most_keys, sizes.heads_per_task, sizes.most_rows, sizes.segment);
        } else {
            query_tile.lay_out(arena, {query_elements<T>(sizes.parts) * kValuesPerElement<T>, sizes.dims.v}, most_keys);
            keys.lay_out(arena, sizes.dims, kDecodeKeys);
            tile.lay_out(arena, kDecodeKeys, !sizes.parts.plain);
        }
    }
};

// One part of a call with its memory.
template <class T>
struct DecodePart {
    DecodeSizes sizes;
    RowBlock* list = nullptr;  // packed: the row blocks
    int64_t blocks = 0;        // row blocks of this call
    Partials<T> partials;
    int32_t* finished = nullptr;  // number of finished splits of each query tile
    size_t scratch_bytes = 0;     // of one thread

    void lay_out(Arena& arena, const DecodeProblem& problem) {
        if (sizes.blocks == 0) return;
        if (problem.q_rows.packed()) list = arena.allocate<RowBlock>(sizes.blocks);
        if (sizes.splits > 1) {
            const int64_t query_tiles = sizes.blocks * problem.heads_k;
            partials.lay_out(arena, query_tiles * sizes.splits, sizes.width, sizes.output_elements());
            finished = arena.allocate<int32_t>(query_tiles);
        }
        Arena one(nullptr);
        DecodeScratch<T>().lay_out(one, sizes, problem.cache.capacity);
        scratch_bytes = one.used();
    }
    // Finds the row blocks of this call: a packed call reads its lengths. Sets the counters of finished splits to 0.
    void start(const DecodeProblem& problem) {
        blocks = list ? 0 : sizes.blocks;
        for (int64_t b = 0; list && b < problem.batch; ++b) {
            const int64_t rows = problem.group_size() * problem.q_rows.length(b);
            if ((rows <= kSmallQRows) != sizes.few_rows) continue;
            for (int64_t row0 = 0; row0 < rows; row0 += sizes.block_rows)
                list[blocks++] = {b, row0, rows - row0 < sizes.block_rows ? rows - row0 : sizes.block_rows};
        }
        for (int64_t n = 0; finished && n < blocks * problem.heads_k; ++n) finished[n] = 0;
    }
    RowBlock block(int64_t n) const { return list ? list[n] : sizes.block(n); }
    int64_t tasks(const DecodeProblem& problem) const { return blocks * sizes.splits * sizes.head_tasks(problem); }
};

// The whole workspace: rotated queries, partial results, then the scratch memory of each thread.
template <class T>
struct DecodeMemory {
    T* rotated = nullptr;
    DecodePart<T> many_rows, few_rows;
    char* scratch_memory = nullptr;
    size_t scratch_bytes = 0, bytes = 0;  // scratch_bytes: of one thread
    int64_t most_keys = 0;                // upper bound for a sequence

    DecodeMemory(const DecodeProblem& problem, int most_threads, int threads, void* workspace) {
        Arena arena(workspace);
        const int64_t rows = problem.q_rows.packed() ? problem.seqlen_q : problem.batch * problem.seqlen_q;
        if (problem.rotary_cos.present) rotated = arena.allocate<T>(rows * problem.heads_q * problem.head_dim);
        many_rows.sizes = decode_sizes<T>(problem, false, most_threads);
        few_rows.sizes = decode_sizes<T>(problem, true, most_threads);
        many_rows.lay_out(arena, problem);
        few_rows.lay_out(arena, problem);
        most_keys = problem.cache.capacity;
        scratch_bytes = many_rows.scratch_bytes > few_rows.scratch_bytes ? many_rows.scratch_bytes : few_rows.scratch_bytes;
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
