// What a warp of forward in float64 computes for a tile of keys. It has 16 query rows, whose scores, probabilities and O stay in
// registers. With more than 128 channels two warps have the same rows, with more than 256 four warps. Each of them multiplies
// every second (fourth) block of 16 channels; they add their parts of the scores through shared memory. All of them compute the
// probabilities, and each multiplies them by its channels of V.
//
// Lane 4 * g + t has rows g and g + 8, and keys 2t and 2t + 1 of each block of 8 keys. In the product with V the order of the
// keys does not matter. So key 2t + e of a block is number t + 4e in the left operand, an element that the same lane holds.
#pragma once

#include "cuda/attention/shard.cuh"
#include "cuda/params.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/mma_f64.cuh"
#include "cuda/sm80/score_f64.cuh"
#include "cuda/tile/double_tile.cuh"
#include "cuda/tile/exp_f64.cuh"

namespace libflash::cuda::sm80 {

constexpr int kRowsOfWarp = 16;

template <int kHeadDim, int kTileK>
struct DoubleRows {
    static constexpr int kSharers = kScoreParts<kHeadDim>;  // warps that have the same rows
    static constexpr int kKeyBlocks = kTileK / 8;
    static constexpr int kSteps = kTileK < 16 ? 2 : 4;  // steps of four keys in an instruction of the product with V
    static constexpr int kChannelBlocks = kHeadDim / 8 / kSharers;
    static constexpr int kChunk = 4;                           // blocks of channels that are multiplied or skipped together
    static constexpr int kSlotNumbers = kRowsOfWarp * kTileK;  // numbers of a warp in shared memory: a slot for each score
    static constexpr int kElements = kKeyBlocks * 4;           // scores of a lane
    static_assert(kTileK == 8 || kTileK % 16 == 0, "");
    static_assert(kElements <= 32 && kChannelBlocks % kChunk == 0, "");
    using Scores = double[kKeyBlocks][4];

    double o[kChannelBlocks][4];
    int2 seen[2];  // the keys [x, y) that each of the lane's rows sees
    double maximum[2], sum[2];
    double *slots, *slots_of_other;  // of this warp, and of the other warp with the same rows (of four warps: the first one)
    int local;                       // the first row in the tile
    int sharer;                      // which of the warps with these rows
    unsigned g, t;

    __device__ __forceinline__ void init(double* slots_of_warps, int warp, int lane) {
        local = warp / kSharers * kRowsOfWarp;
        sharer = warp % kSharers;
        slots = slots_of_warps + warp * kSlotNumbers + lane;
        slots_of_other = slots_of_warps + (kSharers == 4 ? warp / 4 * 4 : warp ^ 1) * kSlotNumbers + lane;
        g = lane / 4, t = lane % 4;
#pragma unroll
        for (int n = 0; n < kChannelBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[n][e] = 0.0;
        maximum[0] = maximum[1] = -INFINITY;
        sum[0] = sum[1] = 0.0;
    }
    __device__ __forceinline__ int row(int h) const { return local + h * 8 + g; }

    // The first channel of a block of 8 of this warp.
    __device__ __forceinline__ int channel_of(int block) const { return (block / 2 * kSharers + sharer) * 16 + block % 2 * 8; }

    // Waits until the other warps with these rows have arrived.
    __device__ __forceinline__ void wait_for_sharer() const {
        if (kSharers > 1) named_barrier_wait(1 + local / kRowsOfWarp, kSharers * 32);
    }

    // s = Q K^T, over all channels.
    template <class Queries, class Keys>
    __device__ __forceinline__ void multiply_qk(Scores& s, const Queries& q, const Keys& k, int channels) const {
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = 0.0;
        // The rows of both tiles that this lane reads have the permutation of row g. `at`: columns relative to a multiple of 16.
        const unsigned permuted = Keys::permutation(g) * 4;
        const double *const left = q.data + (local + g) * kHeadDim, *const right = k.data + g * kHeadDim;
        unsigned at[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) at[i] = (4 * i ^ permuted) + t;
#pragma unroll 1
        for (int c = sharer * 16; c < channels; c += 16 * kSharers) {
            double a[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) a[i] = left[i % 2 * 8 * kHeadDim + c + at[i / 2]];
#pragma unroll
            for (int n = 0; n < kKeyBlocks; ++n) {
                double b[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) b[i] = right[n * 8 * kHeadDim + c + at[i]];
                mma_m16n8(s[n][0], s[n][1], s[n][2], s[n][3], a, b);
            }
        }
        if (kSharers > 1) add_scores_of_sharer(s);
    }
    // Adds the parts of the scores of the other warps. All warps compute the same sums, bit for bit. With four warps the slots
    // are in the tile of K.
    __device__ __forceinline__ void add_scores_of_sharer(Scores& s) const {
        if (kSharers == 4) wait_for_sharer();  // the other warps have read K
#pragma unroll
        for (int i = 0; i < kElements; ++i) slots[i * 32] = s[i / 4][i % 4];
        wait_for_sharer();
        if constexpr (kSharers == 4) {
#pragma unroll
            for (int i = 0; i < kElements; ++i) {
                const double* const parts = slots_of_other + i * 32;
                s[i / 4][i % 4] = parts[0] + parts[kSlotNumbers] + parts[2 * kSlotNumbers] + parts[3 * kSlotNumbers];
            }
        } else {
#pragma unroll
            for (int i = 0; i < kElements; ++i) s[i / 4][i % 4] += slots_of_other[i * 32];
        }
    }

    // Whether some row of the warp sees a key of the tile, and whether all rows see all its keys. The same in all lanes.
    __device__ __forceinline__ bool sees_any(int first_key) const {
        const auto sees = [&](int2 keys) { return keys.x < first_key + kTileK && keys.y > first_key; };
        return __any_sync(0xffffffffu, sees(seen[0]) || sees(seen[1]));
    }
    __device__ __forceinline__ bool sees_all(int first_key) const {
        const auto sees = [&](int2 keys) { return keys.x <= first_key && keys.y >= first_key + kTileK; };
        return !__any_sync(0xffffffffu, !sees(seen[0]) || !sees(seen[1]));
    }

    // Converts dot products to scores, -infinity where a row does not see a key. Without options that change scores.
    __device__ __forceinline__ void scale(Scores& s, double factor, int first_key) const {
        const bool whole = sees_all(first_key);
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            const int key = first_key + i / 4 * 8 + 2 * static_cast<int>(t) + i % 2;
            const int2 keys = seen[i % 4 / 2];
            double& x = s[i / 4][i % 4];
            x = whole || (key >= keys.x && key < keys.y) ? x * factor : -INFINITY;
        }
    }
    // The same with options, in a loop over slots that contains their code only once. rule(dot, row in the tile, key) returns the
    // score of a visible element; drops(row in the tile, key) whether dropout drops it. Returns a bit mask of dropped elements.
    template <class Rule, class Drops>
    __device__ __forceinline__ uint32_t score(Scores& s, int first_key, const Rule& rule, const Drops& drops) const {
        wait_for_sharer();  // the other warps have read the dot products in the slots
#pragma unroll
        for (int i = 0; i < kElements; ++i) slots[i * 32] = s[i / 4][i % 4];
        uint32_t dropped = 0;
#pragma unroll 1
        for (int i = 0; i < kElements; ++i) {
            const int key = first_key + i / 4 * 8 + 2 * static_cast<int>(t) + i % 2, h = i % 4 / 2;
            const int2 keys = h == 0 ? seen[0] : seen[1];
            const bool visible = key >= keys.x && key < keys.y;
            slots[i * 32] = visible ? rule(slots[i * 32], row(h), key) : -INFINITY;
            if (visible && drops(row(h), key)) dropped |= 1u << i;
        }
#pragma unroll
        for (int i = 0; i < kElements; ++i) s[i / 4][i % 4] = slots[i * 32];
        return dropped;
    }

    // Converts scores to exp(score - maximum), 0 where they are dropped. Rescales O and the sums to the new maximum.
    __device__ __forceinline__ void apply_softmax(Scores& s, uint32_t dropped) {
        double factors[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            double largest = -INFINITY;
#pragma unroll
            for (int n = 0; n < kKeyBlocks; ++n) largest = fmax(largest, fmax(s[n][2 * h], s[n][2 * h + 1]));
            const double raised = fmax(maximum[h], largest_of_lanes<4>(largest));
            const double base = raised == -INFINITY ? 0.0 : raised;
            double more = 0.0;
#pragma unroll
            for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; ++e) {
                    const double p = exp_of_score(s[n][e] - base);
                    more += p;
                    s[n][e] = dropped >> (n * 4 + e) & 1 ? 0.0 : p;
                }
            factors[h] = exp_of_score(maximum[h] - base);
            sum[h] = sum[h] * factors[h] + more;
            maximum[h] = raised;
        }
        if (!__any_sync(0xffffffffu, factors[0] != 1.0 || factors[1] != 1.0)) return;
#pragma unroll
        for (int n = 0; n < kChannelBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[n][e] *= factors[e / 2];
    }

    // o += P V. Channels past the last one are not stored, so they may have any value.
    template <class Values>
    __device__ __forceinline__ void multiply_pv(const Scores& p, const Values& v, int channels) {
        // The addresses of keys 2t and 2t + 1 of the first block of 8, in two blocks of channels. All other addresses are at
        // constant distances from these.
        const double* at[2][2];  // [key][block of channels]
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned key = 2 * t + i / 2;
            at[i / 2][i % 2] = v.data + key * kHeadDim + ((i % 2 * 8 + g) ^ Values::permutation(key) * 4) + sharer * 16;
        }
#pragma unroll
        for (int chunk = 0; chunk < kChannelBlocks; chunk += kChunk) {
            if (channel_of(chunk) >= channels) break;
#pragma unroll
            for (int first = 0; first < kKeyBlocks; first += kSteps / 2) {
                double a[2 * kSteps];
#pragma unroll
                for (int i = 0; i < 2 * kSteps; ++i) a[i] = p[first + i / 4][i % 2 * 2 + i / 2 % 2];
#pragma unroll
                for (int n = chunk; n < chunk + kChunk; ++n) {
                    double b[kSteps];
#pragma unroll
                    for (int i = 0; i < kSteps; ++i)
                        b[i] = at[i % 2][n % 2][(first + i / 2) * 8 * kHeadDim + n / 2 * kSharers * 16];
                    mma_m16n8(o[n][0], o[n][1], o[n][2], o[n][3], a, b);
                }
            }
        }
    }

    // Writes O to the rows of a tile.
    template <class Tile>
    __device__ __forceinline__ void stage(const Tile& tile) const {
#pragma unroll
        for (int n = 0; n < kChannelBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) tile.at(row(e / 2), channel_of(n) + 2 * t + e % 2) = o[n][e];
    }
};

}  // namespace libflash::cuda::sm80
