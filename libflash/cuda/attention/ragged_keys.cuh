// Decode of sequences of any lengths: the query rows, new rows and keys of a sequence, the work tile of a thread block, and which
// keys a row sees by the mask rule, positions and tree bits. The rules are those of SequenceKeys (problem/sequence_keys.h).
// Lengths, positions and bits come from device memory unchecked; they are clamped here.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/decode_params.h"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/prefix_sum.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/ptx/active_lanes.cuh"

namespace libflash::cuda {

// The query rows of a sequence.
struct RaggedSequence {
    int32_t batch;   // negative: no sequence
    int32_t start;   // first query row, inside the batch entry or the packed tensor
    int32_t before;  // query rows of all sequences before it
    int32_t rows;

    static __device__ __forceinline__ RaggedSequence of(const RaggedParams& ragged, int batch) {
        const SequenceRows rows = SequenceRows::of(ragged.queries, batch);
        return {batch, rows.start, ragged.queries.cu ? rows.start : batch * ragged.queries.capacity, rows.owned};
    }
};

// A row, counted over all sequences: its sequence (negative if it belongs to none) and its number in the sequence. Bisection
// finds the sequence if the prefix sums ascend. If it finds none although the row is no padding, the prefix sums do not ascend,
// and all sequences are tried.
struct RaggedRow {
    int32_t batch, row;

    static __device__ __forceinline__ RaggedRow of(const LengthsParams& lengths, int batch_count, int of_all) {
        if (!lengths.cu) return {of_all / lengths.capacity, of_all % lengths.capacity};
        int low = 0, high = batch_count;  // the last sequence that begins at or before the row
        while (low + 1 < high) {
            const int middle = low + (high - low) / 2;
            (lengths.cu[middle] <= of_all ? low : high) = middle;
        }
        const RaggedRow found = in_sequence(lengths, low, of_all);
        if (found.batch >= 0 || is_padding(lengths, batch_count, of_all)) return found;
        return try_all(lengths, batch_count, of_all, 0, 1);
    }
    // Whether a packed row belongs to a sequence. All lanes of the warp ask for the same row: each looks at another sequence.
    static __device__ __forceinline__ bool exists(const LengthsParams& lengths, int batch_count, int of_all) {
        const int lane = static_cast<int>(threadIdx.x % 32);
        int low = 0, high = batch_count;
        while (low + 1 < high) {
            const int step = (high - low + 31) / 32, probe = min(low + step * lane, high);
            const unsigned begun = __ballot_sync(0xffffffffu, probe < high && lengths.cu[probe] <= of_all);
            low += step * max(0, __popc(begun) - 1), high = min(high, low + step);
        }
        if (in_sequence(lengths, low, of_all).batch >= 0) return true;
        return __any_sync(0xffffffffu, try_all(lengths, batch_count, of_all, lane, 32).batch >= 0);
    }

private:
    static __device__ __forceinline__ RaggedRow in_sequence(const LengthsParams& lengths, int batch, int of_all) {
        const SequenceRows rows = SequenceRows::of(lengths, batch);
        const int row = of_all - rows.start;
        return {row >= 0 && row < rows.owned ? batch : -1, row};
    }
    // Whether the row is past all prefix sums. In a CUDA graph many rows may be: the lanes share the loads.
    static __device__ __forceinline__ bool is_padding(const LengthsParams& lengths, int batch_count, int of_all) {
        const ActiveLanes lanes = ActiveLanes::now();
        int last = 0;
#pragma unroll 2
        for (int i = lanes.rank(); i <= batch_count; i += lanes.count()) last = max(last, lengths.cu[i]);
        return of_all >= lanes.max(last);
    }
    // Looks at sequences first, first + step, ...
    static __device__ __forceinline__ RaggedRow try_all(const LengthsParams& lengths, int batch_count, int of_all, int first,
                                                        int step) {
#pragma unroll 1
        for (int batch = first; batch < batch_count; batch += step) {
            const RaggedRow own = in_sequence(lengths, batch, of_all);
            if (own.batch >= 0) return own;
        }
        return {-1, 0};
    }
};

// The number of keys of a sequence, with the new keys. kShards: the cache may have a shard of the keys.
template <bool kShards = true>
__device__ __forceinline__ KeyCount ragged_key_count(const DecodeParams& p, int batch) {
    const int news = SequenceRows::of(p.ragged.news, batch).owned;
    if (!kShards || p.shard.count <= 1) return KeyCount::of(p.cache, batch, news);
    const int length = cached_keys(p, batch) + news;
    return {length, min(row_of_key(p.shard, length), p.cache.capacity),
            p.cache.leftpad ? min(max(p.cache.leftpad[batch], 0), length) : 0};
}

// Positions are below kUnboundedWindow, so that sums with a window fit 32 bits.
__device__ __forceinline__ int ragged_position(const int32_t* positions, int row) {
    return min(max(positions[row], 0), kUnboundedWindow - 1);
}

// How many work tiles `rows` query rows of a key head make: one for at most kDecodeSlab rows, otherwise tiles of `tile_rows`
// rows.
__device__ __forceinline__ int ragged_tiles(int rows, int tile_rows) {
    return rows <= kDecodeSlab ? rows > 0 : (rows + tile_rows - 1) / tile_rows;
}

// The work tile of a thread block. It is in shared memory because registers are scarce.
struct RaggedWorkTile {
    int32_t batch, head_k, split, first_row, rows;  // as in Decode::WorkTile; split: for invariant rows the group of segments
    RaggedSequence sequence;
};

struct RaggedTile {
    int32_t batch;  // negative: nothing to do
    int32_t tile;
};

// If the prefill kernel takes long chunks: each sequence has the same number of work tiles, some of which may be empty.
template <int kTileRows>
__device__ __forceinline__ RaggedTile find_short_tile(const DecodeParams& p, int index) {
    const int batch = divide(index, p.ragged.short_tiles), tile = index - batch * static_cast<int>(p.ragged.short_tiles.divisor),
              rows = SequenceRows::of(p.ragged.queries, batch).owned;
    const bool exists = rows <= p.ragged.most_rows && tile < ragged_tiles(rows * p.group_size, kTileRows);
    return {exists ? batch : -1, tile};
}

// Work tile `index` of a key head, counted over all sequences. A warp finds it by prefix sums. A lane counts several sequences,
// so that their lengths are loaded at once. Every warp of the thread block computes the same result.
__device__ __forceinline__ RaggedTile find_ragged_tile(const DecodeParams& p, int index, int tile_rows) {
    constexpr int kOfLane = 4;
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int first = 0; first < p.batch; first += 32 * kOfLane) {
        int tiles[kOfLane], own = 0;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            const int batch = first + lane * kOfLane + i;
            const int rows = batch < p.batch ? SequenceRows::of(p.ragged.queries, batch).owned : 0;
            own += tiles[i] = ragged_tiles(rows * p.group_size, tile_rows);
        }
        const int sum = inclusive_prefix_sum(own, lane);
        const int total = __shfl_sync(0xffffffffu, sum, 31);
        if (index < before + total) {
            int at = index - (before + sum - own), found = -1, tile = 0;
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) {
                if (at >= 0 && at < tiles[i]) found = first + lane * kOfLane + i, tile = at;
                at -= tiles[i];
            }
            const int winner = max(__ffs(static_cast<int>(__ballot_sync(0xffffffffu, found >= 0))) - 1, 0);
            return {__shfl_sync(0xffffffffu, found, winner), __shfl_sync(0xffffffffu, tile, winner)};
        }
        before += total;
    }
    return {-1, 0};
}

// The rows of tree_mask of a sequence.
struct TreeBits {
    const int32_t* first;
    int32_t rows;  // 0: the sequence has none and is causal

    static __device__ __forceinline__ TreeBits of(const TreeParams& tree, int batch) {
        if (!tree.data) return {nullptr, 0};
        const SequenceRows rows = SequenceRows::of(tree.lengths, batch);
        const int before = tree.lengths.cu ? rows.start : batch * tree.lengths.capacity;
        return {tree.data + before * tree.row, rows.owned};
    }
    // Whether the row sees the n-th of the last Lq keys.
    __device__ __forceinline__ bool has(const TreeParams& tree, int row, int n) const {
        if (n / 32 >= tree.words || row >= rows) return false;
        return static_cast<uint32_t>(first[row * tree.row + n / 32 * tree.word]) >> (n % 32) & 1;
    }
};

// The keys that the query rows [first_row, last_row] of a sequence see, as VisibleKeys. A sequence has gaps if a row may see only
// some keys of its range, or if positions matter. Registers are scarce: data that is needed only with gaps is read again there.
//
// kShards: the cache may have a shard of the keys. Then a key number is its row in the cache; lengths, `leftpad` and `shift`
// count all keys.
template <bool kShards>
struct RaggedKeysOf : VisibleKeys {
    const DecodeParams& params;
    const RaggedSequence& sequence;  // in shared memory
    int32_t shift;                   // the number of the key on the diagonal of row 0

    __device__ __forceinline__ RaggedKeysOf(const DecodeParams& p, const RaggedSequence& rows, int first_row, int last_row,
                                            int split, int unit)
        : VisibleKeys(ragged_key_count<kShards>(p, rows.batch)), params(p), sequence(rows), shift(length - rows.rows) {
        const TreeBits bits = tree_bits();
        const VisibleRange one = range(bits, first_row), other = range(bits, last_row);
        int begin = one.begin;
        plain = other.begin, plain_end = one.end;
        if (has_gaps(bits)) reduce_ranges(bits, first_row, last_row, begin);
        take_split(p, begin, other.end, split, unit);
    }

    __device__ __forceinline__ TreeBits tree_bits() const { return TreeBits::of(params.ragged.tree, sequence.batch); }
    __device__ __forceinline__ bool has_gaps(const TreeBits& bits) const {
        const RaggedParams& ragged = params.ragged;
        const bool window = ragged.left < kUnboundedWindow || ragged.right < kUnboundedWindow;
        if (kShards && params.shard.count > 1 && params.alibi_slopes.data) return true;
        return bits.rows > 0 || (ragged.positions && (window || params.alibi_slopes.data));
    }

    // The keys that a row sees are those of this range that sees() accepts.
    __device__ __forceinline__ VisibleRange range(const TreeBits& bits, int row) const {
        const VisibleRange numbers = range_of_numbers(bits, row);
        if (!kShards || params.shard.count <= 1) return numbers;
        return {shard_row(numbers.begin), min(shard_row(numbers.end), existing)};
    }
    // Whether the row sees a key of its range; for other keys the result has no meaning. Without gaps the row sees all keys of
    // its range.
    __device__ __forceinline__ bool sees(const TreeBits& bits, int row, int key) const {
        const RaggedParams& ragged = params.ragged;
        const int distance = key_position(key) - position(row), n = number_of(key) - shift;
        if (distance < -ragged.left || distance > ragged.right) return false;
        return n < 0 || bits.rows == 0 || bits.has(ragged.tree, row, n);
    }

    __device__ __forceinline__ int position(int row) const {
        const int32_t* positions = params.ragged.positions;
        return positions ? ragged_position(positions, sequence.before + row) : shift + row;
    }
    // The position of any key of a tile, even past the last key.
    __device__ __forceinline__ int key_position(int key) const {
        const int number = number_of(key);
        return params.ragged.positions && number >= shift && number < length ? position(number - shift) : number;
    }

private:
    __device__ __forceinline__ int number_of(int key) const { return kShards ? key_of_row(params.shard, key) : key; }
    __device__ __forceinline__ int shard_row(int number) const {
        return kShards ? row_of_key(params.shard, max(number, 0)) : number;
    }

    __device__ __forceinline__ VisibleRange range_of_numbers(const TreeBits& bits, int row) const {
        const RaggedParams& ragged = params.ragged;
        const bool without_bits = ragged.tree.data && bits.rows == 0;  // such a sequence is causal
        if (!has_gaps(bits)) return clipped(row + shift - params.left, row + shift + (without_bits ? 0 : params.right) + 1);
        const int at = position(row);
        const VisibleRange earlier = clipped(at - ragged.left, min(at + ragged.right + 1, shift));
        const int end = without_bits || (ragged.causal && bits.rows == 0) ? row + shift + 1 : length;
        return clipped(earlier.begin < earlier.end ? earlier.begin : shift, end);
    }
    __device__ __forceinline__ VisibleRange clipped(int begin, int end) const {
        return {max(begin, leftpad), min(end, kShards && params.shard.count > 1 ? length : existing)};
    }

    // With gaps the ranges of later rows need not begin later; they do not end earlier.
    __device__ __forceinline__ void reduce_ranges(const TreeBits& bits, int first_row, int last_row, int& begin) {
        for (int row = first_row + static_cast<int>(threadIdx.x % 32); row <= last_row; row += 32) {
            const VisibleRange own = range(bits, row);
            begin = min(begin, own.begin);
            plain = max(plain, own.begin);
            // From the first possible gap on, a row may not see every key of its range.
            const int first_gap = min(position(row) + params.ragged.right + 1, shift);
            plain_end = min(plain_end, min(own.end, shard_row(first_gap)));
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            begin = min(begin, __shfl_xor_sync(0xffffffffu, begin, step));
            plain = max(plain, __shfl_xor_sync(0xffffffffu, plain, step));
            plain_end = min(plain_end, __shfl_xor_sync(0xffffffffu, plain_end, step));
        }
    }
};

using RaggedKeys = RaggedKeysOf<false>;

}  // namespace libflash::cuda
