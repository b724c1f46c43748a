// What the kernels of decode receive, and how much shared memory a thread block of them takes. No CUDA header.
#pragma once

#include "cuda/attention/params.h"

namespace libflash::cuda {

// Where the keys of each sequence lie.
struct CacheParams {
    RowsParams k, v;         // `batch`: from one entry or page to the next
    const int32_t* seqlens;  // valid keys before the call; nullptr: default_seqlen for all
    const int32_t* entries;  // contiguous: entry of each sequence; nullptr: its own number
    const int32_t* table;    // paged: page of each column; else nullptr
    int64_t table_batch, table_column;
    const int32_t* leftpad;  // or nullptr
    int32_t default_seqlen, seqlen_new, capacity;
    int32_t places;  // entries or pages there are
    Divisor page;    // paged: its size
};

// New rows, what turns them, and where turned queries go.
struct AppendParams {
    RowsParams q, k_new, v_new;  // data is nullptr where there is nothing to do
    RowsParams turned;           // (batch, seqlen_q, heads_q, channels)
    const void *cos, *sin;       // (positions, pairs); nullptr: nothing is turned
    int64_t cos_row, sin_row;
    int32_t positions, pairs;
    bool interleaved, is_float;
    bool query_rows_advance;  // query row i stands i positions behind the first
    bool within;              // a step of one row a sequence: decode does all this itself
};

struct DecodeParams {
    RowsParams q, out;
    RowStatisticsParams lse;
    CacheParams cache;
    AppendParams append;
    int32_t batch, seqlen_q, heads_q, heads_k, group_size;
    Divisor by_tiles, by_heads, by_splits, by_group;  // tiles of the packed rows of a key head; heads_k, splits, group_size
    Divisor by_head_groups;                           // heads_k / heads_beside
    int32_t head_dim, head_dim_v;
    float softmax_scale, scale_log2, softcap;
    int32_t left, right;  // of the diagonal that ends at the last query row and the last key
    HeadParams alibi_slopes, sink;
    int32_t splits;            // ranges of keys that a sequence is cut into at most
    int32_t split_size;        // keys of each; 0: equal ranges of what is visible
    float* partial_out;        // [batch][heads_k][row][split][kHeadDim], if there is more than one split
    float* partial_lse;        // [batch][heads_k][row][split], in base-2 units
    bool vector_q, vector_kv;  // rows may be read 16 bytes at a time
    bool vector_out;           // rows of out may be written two elements at a time
    int32_t stages;            // tiles of keys under way: as many as the kernel has room for, or one fewer
    uint32_t late_begin;       // thread blocks from this one on,
    uint32_t late_count;       // so many, begin a little later
    int32_t heads_beside;      // key heads that a thread block takes: 1, or what decode_heads_beside() says
    bool fetch_early;          // into the L2 cache, before the kernel ahead has ended
};

// Warps that share keys work on rows of their own, 16 each; with 16 rows or fewer it is the other way round.
constexpr int kDecodeSlab = 16;
constexpr bool decode_shares_keys(int64_t rows) { return rows > kDecodeSlab; }

// Whether thread blocks can take in one new row: a thread of theirs for every two channels.
constexpr bool decode_takes_in_rows(int head_dim, int tile_k) { return tile_k / kDecodeSlab * 32 >= head_dim / 2; }

// `tile_k`: keys of a tile, of all heads; `tile_rows`: query rows of a thread block.
constexpr int decode_shared_bytes(int head_dim, int tile_k, int stages, int element_bytes, int tile_rows) {
    const int row = head_dim * element_bytes, warps = tile_k / kDecodeSlab;
    return stages * 2 * tile_k * row + tile_rows * row + stages * warps * (1 + kDecodeSlab) * 4;
}

// Thread blocks that a multiprocessor runs at the same time, if a thread block may have `most` bytes of shared memory: as many as fit, up to 256 threads,
// which is what registers suffice for.
constexpr int decode_blocks_at_once(int bytes, int most, int threads) {
    const int fit = (most + 1024) / (bytes + 1024), enough = 256 / threads;  // 1 KB is reserved for each
    return fit < 1 || enough < 1 ? 1 : (fit < enough ? fit : enough);
}

// Key heads that a thread block may take side by side. Not where only one thread block finds room in a multiprocessor.
constexpr int decode_heads_beside(int head_dim, int tile_k, int stages, int element_bytes) {
    constexpr int kMost = 2;
    const int threads = tile_k / kDecodeSlab * 32;
    const bool all_take_in = threads >= kMost * (head_dim / 2),
               two_blocks =
                   decode_blocks_at_once(decode_shared_bytes(head_dim, tile_k, stages, element_bytes, kMost * kDecodeSlab),
                                         227 * 1024, threads) >= 2;
    return all_take_in && two_blocks && element_bytes == 2 ? kMost : 1;
}

}  // namespace libflash::cuda
