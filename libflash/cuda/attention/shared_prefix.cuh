// Decode of sequences that share their first keys (shared_groups, shared_lens): which of its keys a sequence shares, and which
// sequences a thread block of decode_prefix.cuh computes. The arrays come from device memory unchecked; they are clamped here, so
// that a wrong hint gives wrong results but no wrong address.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/decode_params.h"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/prefix_sum.cuh"

namespace libflash::cuda {

// How far a score may exceed the kept maximum, in base-2 units. P is then at most 2^8; the smallest number of `half` is 2^-24.
constexpr float kDecodeSlack = 8.0f;

// Sequences [begin, end) with the same first keys. A single sequence shares nothing.
struct SharedGroup {
    int32_t begin, end, keys;

    static __device__ __forceinline__ SharedGroup of(const SharedPrefixParams& shared, int batch_count, int group) {
        if (group >= shared.count) return {0, 0, 0};
        const int begin = min(max(shared.groups[group], 0), batch_count),
                  end = min(max(shared.groups[group + 1], 0), batch_count);
        const int keys = max(shared.lens[group], 0);
        if (end - begin < 2 || keys == 0) return {0, 0, 0};
        return {begin, end, keys};
    }
};

// How many of its first keys a sequence shares. All lanes of a warp call it.
__device__ __forceinline__ int shared_keys_of(const SharedPrefixParams& shared, int batch_count, int batch) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < shared.count; first += 32) {
        const SharedGroup group = SharedGroup::of(shared, batch_count, first + lane);
        const uint32_t found = __ballot_sync(0xffffffffu, group.begin <= batch && batch < group.end);
        if (found) return __shfl_sync(0xffffffffu, group.keys, __ffs(static_cast<int>(found)) - 1);
    }
    return 0;
}

// The end of the keys of a split that the kernel for shared keys computes: whole tiles of `unit` keys that were valid before the
// call.
__device__ __forceinline__ int end_of_prefix(const DecodeParams& p, const VisibleKeys& range, int shared_keys, int unit) {
    return min(min(shared_keys, range.length - p.cache.seqlen_new) / unit * unit, range.last);
}

// Sequences [begin, end) of a group, whose rows form a tile; the keys are those of the group's first sequence.
struct PrefixTile {
    int32_t begin, end, first, keys;  // begin negative: nothing to do
};

// Tile `index`, where each tile has `of_tile` sequences of a group. A warp finds it by prefix sums. Every warp computes the same
// result.
__device__ __forceinline__ PrefixTile find_prefix_tile(const SharedPrefixParams& shared, int batch_count, int index,
                                                       int of_tile) {
    const int lane = threadIdx.x % 32;
    int before = 0;
#pragma unroll 1
    for (int first = 0; first < shared.count; first += 32) {
        const SharedGroup group = SharedGroup::of(shared, batch_count, first + lane);
        const int tiles = (group.end - group.begin + of_tile - 1) / of_tile, sum = inclusive_prefix_sum(tiles, lane);
        const int at = index - (before + sum - tiles);
        const uint32_t found = __ballot_sync(0xffffffffu, at >= 0 && at < tiles);
        if (found) {
            const int begin = group.begin + at * of_tile, winner = __ffs(static_cast<int>(found)) - 1;
            const auto of_winner = [&](int x) { return __shfl_sync(0xffffffffu, x, winner); };
            return {of_winner(begin), of_winner(min(begin + of_tile, group.end)), of_winner(group.begin), of_winner(group.keys)};
        }
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    return {-1, -1, 0, 0};
}

// Each slab of kDecodeSlab rows of a tile has all rows of as many sequences as fit.
__device__ __forceinline__ int sequences_of_prefix_tile(const DecodeParams& p, int tile_rows) {
    return tile_rows / kDecodeSlab * (kDecodeSlab / (p.seqlen_q * p.group_size));
}

// A row of a tile: its sequence (negative if there is none); its number in the sequence, over all heads of the key head; and
// which of the shared keys of a split it sees. `unit`: keys of a key tile, over all classes.
struct PrefixRow {
    int32_t batch, packed;
    VisibleRange keys;

    static __device__ __forceinline__ PrefixRow of(const DecodeParams& p, const PrefixTile& tile, int row, int split, int unit) {
        const int rows_of_sequence = p.seqlen_q * p.group_size, of_slab = kDecodeSlab / rows_of_sequence;
        const int in_slab = row % kDecodeSlab, sequence = in_slab / rows_of_sequence;
        const int batch = tile.begin + row / kDecodeSlab * of_slab + sequence, packed = in_slab - sequence * rows_of_sequence;
        if (sequence >= of_slab || batch >= tile.end) return {-1, packed, {INT32_MAX, 0}};
        const VisibleKeys range(p, KeyCount::of(p.cache, batch), 0, p.seqlen_q - 1, split, unit);
        const int last = min(end_of_prefix(p, range, tile.keys, unit), range.end_of_visible(p, divide(packed, p.by_group)));
        if (range.first >= last) return {batch, packed, {INT32_MAX, 0}};
        return {batch, packed, {range.first, last}};
    }
};

// Which lanes have scores that can raise the kept maximum of `row`: bit n for lane n and its row among rows 0 to 7 of the slab,
// bit 32 + n for lane n and its row among rows 8 to 15. These are the bits of all rows of the sequence of `row` or, with
// invariant rows, of `row` itself.
__device__ __forceinline__ uint64_t voters_of_row(const DecodeParams& p, int row) {
    const int of_vote = p.invariant ? 1 : p.seqlen_q * p.group_size;
    const uint64_t all = of_vote == kDecodeSlab ? ~uint64_t{0} : (uint64_t{1} << 4 * of_vote) - 1;
    return all << row / of_vote * of_vote * 4;
}

// The address of the sums of a row over the shared keys of a class; the kept maximum and the row sums follow them.
template <int kHeadDim>
__device__ __forceinline__ float* prefix_sums_of(const DecodeParams& p, int64_t row, int split, int classes, int of_class) {
    return p.shared.sums + ((row * p.splits + split) * classes + of_class) * (kHeadDim + kPrefixStatistics);
}

// Stores a lane's part of a row's sums. pair_of(n): the sums of the two channels that the lane has of channels 8 n to 8 n + 7.
template <int kHeadDim, class PairOf>
__device__ __forceinline__ void store_prefix_sums(float* to, int lane, float kept_maximum, float row_sum, const PairOf& pair_of) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) *reinterpret_cast<float2*>(to + n * 8 + lane % 4 * 2) = pair_of(n);
    if (lane % 4 == 0) to[kHeadDim] = kept_maximum;
    to[kHeadDim + 1 + lane % 4] = row_sum;
}

}  // namespace libflash::cuda
