// Decode of sequences that share their first keys (shared_groups, shared_lens): which of its keys a sequence shares, and which
// sequences a thread block of decode_prefix.cuh takes. The arrays come from device memory unchecked; here they are clamped, so
// that a wrong hint gives wrong results but no wrong address.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/decode_params.h"
#include "cuda/attention/prefix_sum.cuh"

namespace libflash::cuda {

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

// The end of the keys of a split that the kernel for shared keys takes: whole tiles of `unit` keys that were valid before the
// call.
__device__ __forceinline__ int end_of_prefix(const DecodeParams& p, const VisibleKeys& range, int shared_keys, int unit) {
    return min(min(shared_keys, range.length - p.cache.seqlen_new) / unit * unit, range.last);
}

// Sequences [begin, end) of a group, whose rows are a tile; the keys are those of its first sequence.
struct PrefixTile {
    int32_t begin, end, first, keys;  // begin negative: nothing to do
};

// The tile number `index`, each of `of_tile` sequences of a group, by prefix sums of a warp. Every warp computes the same.
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

}  // namespace libflash::cuda
