// The parameters of the decode kernels, and the shared memory of their thread blocks. No CUDA header.
#pragma once

#include "cuda/attention/cache_params.h"
#include "cuda/attention/params.h"
#include "cuda/config.h"

namespace libflash::cuda {

// The KV cache: where the keys of each sequence are.
struct CacheParams {
    RowsParams k, v;         // `batch`: stride between entries or pages
    const int32_t* seqlens;  // valid keys before the call; nullptr: default_seqlen for all
    const int32_t* entries;  // contiguous: the entry of each sequence; nullptr: entry i for sequence i
    const int32_t* table;    // paged: the block table; else nullptr
    int64_t table_batch, table_column;
    const int32_t* leftpad;  // or nullptr
    int32_t default_seqlen, seqlen_new, capacity;
    int32_t pages;      // number of entries or pages
    Divisor page_size;  // paged
};

// The new rows, the rotary embedding, and where rotated queries are written.
struct AppendParams {
    RowsParams q, k_new, v_new;  // data is nullptr where nothing is appended
    RowsParams rotated_q;        // rotated queries: (batch, seqlen_q, heads_q, channels)
    const void *cos, *sin;       // (positions, pairs); nullptr: no rotary embedding
    int64_t cos_row, sin_row;
    int32_t positions, pairs;
    bool interleaved, is_float;
    bool query_rows_advance;  // the position of query row i is the position of row 0 plus i
};

// Bit n % 32 of word n / 32 of a row: the query row sees the n-th of the last keys of its sequence.
struct TreeParams {
    const int32_t* data;  // nullptr: absent
    int64_t row, word;    // strides
    int32_t words;
    LengthsParams lengths;  // a sequence has as many rows as query rows, or none (causal)
};

// The last channels of the keys, of the type of the queries, in a separate cache (k_rope_cache).
struct RopeParams {
    RowsParams cache, news;  // data is nullptr where nothing is appended
    int32_t channels;        // 0: absent
};

// Key t of a sequence is in the cache of shard t / keys % count (problem/cache_shard.h).
struct CacheShardParams {
    int32_t count;               // at most 1: the cache has all keys
    int32_t most_keys;           // the longest sequence whose keys fit into the cache
    int64_t keys, round, first;  // keys of a block; of one block of every shard; the first key of this shard
};

// Further parameters of the ragged instance (ragged_keys.cuh).
struct RaggedParams {
    bool active;
    LengthsParams queries, news;  // the query rows and the new rows of each sequence
    const int32_t* positions;     // of each query row; nullptr: they follow the cached keys
    TreeParams tree;
    int32_t left, right;  // the window without the causal rule
    bool causal;
    // If the prefill kernel takes long chunks: the most query rows of a sequence that the decode kernels compute, and the most
    // tiles these rows make. 0: the decode kernels compute all sequences.
    int32_t most_rows;
    Divisor short_tiles;
};

// Groups of sequences with the same first keys, and the sums over these keys in the workspace (shared_prefix.cuh).
struct SharedPrefixParams {
    const int32_t *groups, *lens;
    int32_t count;    // of groups; 0: the kernels do not use them
    float* sums;      // [batch][heads_k][row][split][class of keys][kHeadDim + kPrefixStatistics]
    int32_t tiles;    // most query tiles of a key head, of all groups together
    int32_t classes;  // of keys
};
constexpr int kPrefixStatistics = 8;  // after the sums of the channels: the kept maximum, and the row sums of four lanes

struct DecodeParams {
    RowsParams q, out;
    RowStatisticsParams lse;
    CacheParams cache;
    AppendParams append;
    int32_t batch, seqlen_q, heads_q, heads_k, group_size;
    Divisor by_tiles, by_heads, by_splits, by_group;  // query tiles of a key head; heads_k; splits; group_size
    Divisor by_head_groups;                           // heads_k / (key heads of a thread block)
    int32_t head_dim, head_dim_v;
    float softmax_scale, scale_log2, softcap;
    int32_t left, right;  // window beside the diagonal through the last query row and the last key
    HeadParams alibi_slopes, sink;
    int32_t splits;            // the most key ranges of a sequence
    int32_t split_size;        // keys of each range; 0: equal ranges of the visible keys
    float* partial_out;        // [batch][heads_k][row][split][kHeadDim], with more than one split
    float* partial_lse;        // [batch][heads_k][row][split], in base-2 units
    bool vector_q, vector_kv;  // rows can be read 16 bytes at a time
    bool vector_out;           // rows of out can be written two elements at a time
    int32_t stages;            // stages in use: all stages of the kernel, or one fewer
    uint32_t delayed_begin;    // the first of the thread blocks that start later
    uint32_t delayed_count;    // the number of thread blocks that start later
    bool fetch_early;          // prefetch the first tiles into L2 before the previous kernel has ended
    CodeType code;             // of the cache
    CacheScaleParams k_scale, v_scale;
    RaggedParams ragged;
    CacheShardParams shard;
    RopeParams rope;
    int32_t k_channels;      // channels of cache.k: the channels of the keys that are not in `rope`
    bool out_is_float;       // with 16-bit queries
    bool invariant;          // the bits of a row depend on its own sequence alone
    int32_t segment;         // instance for invariant rows: keys of each segment; 0: as in invariant_segments.h
    int32_t segment_groups;  // the same: thread blocks that share the segments of a row, if `splits` is more than 1
    bool values_in_keys;     // the values are the first channels of the keys
    int32_t in_pairs;        // sm90, with values in the keys: 1: thread blocks work in pairs (sm90/decode_pair.cuh); else 0
    SharedPrefixParams shared;
    bool beside_prefill;  // the attention kernel runs beside the prefill kernel (beside_prefill.cuh)
};

// The elements of a cache. plain: of the type of the queries; scaled: likewise, with scales; codes: 8-bit codes, with or without
// scales.
enum class DecodeStorage { plain, scaled, codes };

// Stages of the instances for rare options, whose scales take more memory.
constexpr int general_decode_stages(int stages) { return stages < 2 ? stages : 2; }
// The most channels of k_rope_cache with a cache of codes: the stages for codes have memory for this many.
constexpr int most_rope_channels(int head_dim) { return head_dim / 4; }

// Wide heads: two warps work on the same rows and keys, and each has half of the channels of O. There is one instance for each
// storage, for rows of any lengths and with the rare options, because the code is large.
constexpr bool is_wide_decode(int head_dim) { return head_dim > 256; }
constexpr int decode_parts(int head_dim) { return is_wide_decode(head_dim) ? 2 : 1; }

// Query rows of a matrix product. With more rows, all warps of a thread block compute the same keys, and each warp 16 rows; with
// 16 rows or fewer, all warps compute the same rows, and each warp 16 keys.
constexpr int kDecodeSlab = 16;
constexpr int64_t tiles_of_a_row(int64_t group_size) { return (group_size + kDecodeSlab - 1) / kDecodeSlab; }
constexpr bool decode_shares_keys(int64_t rows) { return rows > kDecodeSlab; }

// Whether the attention kernel can append one new row: it needs one thread for every two channels.
constexpr bool decode_can_append(int head_dim, int tile_k) { return tile_k / kDecodeSlab * 32 >= head_dim / 2; }

// Stages of the instances for 8-bit codes, whose tiles have half the bytes. Where warps share keys, shared memory also holds one
// converted tile. Otherwise fewer stages let more thread blocks fit on a multiprocessor, because conversion needs more warps.
constexpr int decode_code_stages(int head_dim, int stages, bool shares_keys) {
    if (shares_keys) return stages;
    if (head_dim <= 64) return 2 * stages;
    return stages > 3 ? stages : 3;
}
// After the kernel for shared keys few keys are left and thread blocks are short: more thread blocks per multiprocessor are
// better.
constexpr int decode_stages_after_prefix(int stages) { return stages > 2 ? stages - 1 : stages; }
constexpr int kDecodeThreads = 256, kDecodeThreadsOfCodes = 384;  // per multiprocessor: there are enough registers

// With one stage, keys and values are loaded in turn into the same shared memory.
constexpr bool decode_loads_in_turn(int stages) { return stages == 1; }

// `tile_k`: keys of a tile, over all its heads; `tile_rows`: query rows of a thread block.
constexpr int decode_shared_bytes(int head_dim, int tile_k, int stages, int element_bytes, int tile_rows) {
    const int row = head_dim * element_bytes, warps = tile_k / kDecodeSlab, slabs = decode_loads_in_turn(stages) ? 1 : 2;
    return stages * slabs * tile_k * row + tile_rows * row + stages * warps * (1 + kDecodeSlab) * 4;
}

// As decode_shared_bytes(), for codes that become operands in registers.
constexpr int decode_code_shared_bytes(int head_dim, int tile_k, int stages, int tile_rows) {
    const int scales = stages * 2 * tile_k * 4, queries = tile_rows * head_dim;  // queries: their second bytes
    return decode_shared_bytes(head_dim, tile_k, stages, 1, tile_rows) + queries + scales;
}

// Thread blocks that are resident on a multiprocessor at once, if a thread block may use at most `most` bytes of shared memory:
// as many as fit, up to `most_threads` threads.
constexpr int decode_blocks_at_once(int bytes, int most, int threads, int most_threads = kDecodeThreads) {
    const int fit = (most + 1024) / (bytes + 1024), enough = most_threads / threads;  // CUDA reserves 1 KB for each
    return fit < 1 || enough < 1 ? 1 : (fit < enough ? fit : enough);
}

// Key heads that a thread block may process at once: 2 if its threads can append the new rows of both and if two thread blocks
// still fit on a multiprocessor, else 1.
constexpr int decode_key_heads(int head_dim, int tile_k, int stages, int element_bytes) {
    constexpr int kMost = 2;
    const int threads = tile_k / kDecodeSlab * 32;
    const bool all_can_append = threads >= kMost * (head_dim / 2),
               two_blocks =
                   decode_blocks_at_once(decode_shared_bytes(head_dim, tile_k, stages, element_bytes, kMost * kDecodeSlab),
                                         227 * 1024, threads) >= 2;
    return all_can_append && two_blocks && element_bytes == 2 ? kMost : 1;
}

// Whether the kernel has the instance `invariant`. float32 and wide heads have no prefill kernel with which the bits must agree,
// so the general instance suffices.
constexpr bool has_invariant_decode(const KernelConfig& config) {
    return element_bytes(config.dtype) == 2 && !is_wide_decode(config.head_dim);
}

constexpr int kAppendedParts = 2;  // of a new row: its key and its value; one more with k_rope_cache
// Threads per block of the append kernel: at least one per channel pair of a row.
constexpr int kAppendThreads = 128;
constexpr int append_threads(int head_dim) { return is_wide_decode(head_dim) ? 512 : kAppendThreads; }

}  // namespace libflash::cuda
