// The dropout mask: one random number of 16 bits for each probability, as libflash.h defines it, so that all kernels agree. One
// call of the generator gives the numbers of 8 keys of a row; lanes that need numbers of the same call share it.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/ptx/hide_from_compiler.cuh"

namespace libflash::cuda {

// Philox4x32-7 (Salmon et al., SC 2011): four words for a counter and a key.
__device__ __forceinline__ uint4 philox(uint4 counter, uint32_t key_low, uint32_t key_high) {
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const uint32_t high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        const uint32_t high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key_low, low1, high0 ^ counter.w ^ key_high, low0);
        key_low += 0x9E3779B9u;
        key_high += 0xBB67AE85u;
    }
    return counter;
}

// The numbers of the eight keys of a row to which `col` belongs, two in each word, the first in its low half. The state in device
// memory is loaded in each call, so that it takes no registers between calls.
__device__ __forceinline__ uint4 dropout_numbers(const DropoutParams& dropout, uint32_t batch_head, int row, int col) {
    const auto numbers = [&](uint32_t seed_low, uint32_t seed_high, uint32_t offset_mix) {
        return philox(make_uint4(static_cast<uint32_t>(col) >> 3, static_cast<uint32_t>(row), batch_head, offset_mix), seed_low,
                      seed_high);
    };
    if (!dropout.state) return numbers(dropout.seed_low, dropout.seed_high, dropout.offset_mix);
    const uint64_t* state = hide_from_compiler(dropout.state);
    const uint64_t offset = state[1], seed = state[0];
    return numbers(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                   static_cast<uint32_t>(offset) ^ (static_cast<uint32_t>(offset >> 32) * 0x9E3779B9u));
}

// Which of the keys col .. col + 7 (col a multiple of 8) of a row are kept: bit i for key col + i.
__device__ __forceinline__ uint32_t kept_keys(const DropoutParams& dropout, uint32_t batch_head, int row, int col) {
    const uint4 w = dropout_numbers(dropout, batch_head, row, col);
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // the threshold is in the high half of a word
        if (words[i] << 16 >= dropout.threshold) kept |= 1u << 2 * i;
        if (words[i] >= dropout.threshold) kept |= 2u << 2 * i;
    }
    return kept;
}

// Whether one probability is kept.
__device__ __forceinline__ bool is_kept(const DropoutParams& dropout, uint32_t batch_head, int row, int key) {
    const uint4 w = dropout_numbers(dropout, batch_head, row, key);
    const uint32_t low = key & 2 ? w.y : w.x, high = key & 2 ? w.w : w.z, word = key & 4 ? high : low;
    return (key & 1 ? word : word << 16) >= dropout.threshold;
}

// The number of a head in the batch: the third word of the counter.
__device__ __forceinline__ uint32_t dropout_head(int batch, int heads_q, int head) {
    return static_cast<uint32_t>(batch) * heads_q + head;
}

// The functions below return a bit for each element: whether it is kept. The generator needs many registers, so it runs in a loop
// that is not unrolled. The whole warp calls them.

// For kRows accumulator rows of this lane, row_of(i), and two neighbouring blocks of 8 keys from col_of(i) on; rows i and i + 1
// (i even) have the same keys. Bit i * kRowBits + n * kBlockBits + e belongs to row i and key
// col_of(i) + 8 * n + 2 * (lane % 4) + e. The four lanes that share rows make one call each for two rows and two blocks.
template <int kRows, int kRowBits = 4, int kBlockBits = 2, class ColOf, class RowOf>
__device__ __forceinline__ uint32_t keep_bits_at(const DropoutParams& dropout, uint32_t batch_head, int lane, const ColOf& col_of,
                                                 const RowOf& row_of) {
    static_assert(kRows == 2 || (kRows % 2 == 0 && kRows <= 8 && kRowBits == 4 && kBlockBits == 2));
    const int own_row = lane >> 1 & 1, own_block = lane & 1;
    uint32_t kept_by_call = 0;  // a byte for each two rows
#pragma unroll 1
    for (int i = 0; i < kRows; i += 2)
        kept_by_call |= kept_keys(dropout, batch_head, row_of(i + own_row), col_of(i) + 8 * own_block) << 4 * i;
    uint32_t keep = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t of_lane = __shfl_sync(0xffffffffu, kept_by_call, (lane & ~3) | i) >> 2 * (lane & 3) & 0x03030303u;
        keep |= of_lane << (i / 2 * kRowBits + i % 2 * kBlockBits);
    }
    return keep;
}

// As above, with the keys from `col` on (a multiple of 8) in all rows.
template <int kRows, int kRowBits = 4, int kBlockBits = 2, class RowOf>
__device__ __forceinline__ uint32_t keep_bits(const DropoutParams& dropout, uint32_t batch_head, int col, int lane,
                                              const RowOf& row_of) {
    return keep_bits_at<kRows, kRowBits, kBlockBits>(dropout, batch_head, lane, [=](int) { return col; }, row_of);
}

// For kPairs pairs of blocks, each 16 keys after the previous pair: the bits of row i in a pair are those of keep_bits() for row
// pair * kRows + i. One loop computes all pairs, because each copy of the generator takes room in the instruction cache.
template <int kRows, int kPairs, class RowOf>
__device__ __forceinline__ uint32_t keep_bits_of_pairs(const DropoutParams& dropout, uint32_t batch_head, int col, int lane,
                                                       const RowOf& row_of) {
    static_assert(kRows * kPairs <= 8, "bits of a word");
    return keep_bits_at<kRows * kPairs>(
        dropout, batch_head, lane, [=](int i) { return col + i / kRows * 16; }, [&](int i) { return row_of(i % kRows); });
}

// For kBlocks transposed accumulator blocks of 16 keys and 8 query rows, kSlabs of them side by side along the keys: block i
// begins at query row row - 2 * (lane % 4) + i / kSlabs * 8 and at key col + i % kSlabs * 16. Bit i * 4 + e belongs to the lane's
// element e: query row 2 * (lane % 4) + e % 2 and key 8 * (e / 2) + lane / 4 of the block. Each lane makes the calls for 16 keys
// of one row of the first four blocks, and of one row of the others.
template <int kBlocks, int kSlabs = 2>
__device__ __forceinline__ uint32_t keep_bits_transposed(const DropoutParams& dropout, uint32_t batch_head, int row, int col,
                                                         int lane) {
    static_assert(kBlocks <= 8);
    const int first_row = row - (lane & 3) * 2;
    uint32_t kept_by_call = 0;  // a byte for each 8 keys
#pragma unroll 1
    for (int i = 0; i < (kBlocks > 4 ? 4 : 2); ++i) {
        const int block = i / 2 * 4 + lane / 8;
        kept_by_call |=
            kept_keys(dropout, batch_head, first_row + block / kSlabs * 8 + lane % 8, col + block % kSlabs * 16 + i % 2 * 8)
            << 8 * i;
    }
    uint32_t keep = 0;
#pragma unroll
    for (int i = 0; i < (kBlocks > 4 ? 8 : 2 * kBlocks); ++i) {
        const int caller = i / 2 * 8 + (lane & 3) * 2 + i % 2;
        const uint32_t found = __shfl_sync(0xffffffffu, kept_by_call, caller) >> (lane >> 2) & 0x01010101u;
        keep |= ((found | found >> 6) & 0x00050005u) << (i / 2 * 4 + i % 2);
    }
    return keep;
}

// Where dropout counts positions rather than rows and keys of the tensors, neighbouring keys need not have numbers of one call.
// So each element has its own call. row_of(i) and col_of(i) give the positions of element i.
template <int kCount, class RowOf, class ColOf>
__device__ __forceinline__ uint32_t keep_bits_of_elements(const DropoutParams& dropout, uint32_t batch_head, const RowOf& row_of,
                                                          const ColOf& col_of) {
    uint32_t keep = 0;
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) keep |= (is_kept(dropout, batch_head, row_of(i), col_of(i)) ? 1u : 0u) << i;
    return keep;
}

// Sets the probabilities that dropout removes to 0. `keep` from keep_bits() with the default order; element_of(i, n, e) is the
// element of row i, block n and column e.
template <int kRows, class ElementAt>
__device__ __forceinline__ void zero_dropped(uint32_t keep, const ElementAt& element_of) {
#pragma unroll
    for (int i = 0; i < kRows * 4; ++i) {
        if (!(keep >> i & 1)) element_of(i / 4, i / 2 % 2, i % 2) = 0.0f;
    }
}

}  // namespace libflash::cuda
