// The dropout mask: one 32-bit random word for each probability, as libflash.h defines it, so that all kernels agree. One call
// of the generator gives the words of 4 keys of a row; lanes that need words of the same call share it.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/ptx/hide_from_compiler.cuh"

namespace libflash::cuda {

// Philox4x32-10 (Salmon et al., SC 2011): four words for a counter and a key.
__device__ __forceinline__ uint4 philox(uint4 counter, uint32_t key_low, uint32_t key_high) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        const uint32_t high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key_low, low1, high0 ^ counter.w ^ key_high, low0);
        key_low += 0x9E3779B9u;
        key_high += 0xBB67AE85u;
    }
    return counter;
}

// The words of the keys col .. col + 3 (col a multiple of 4) of a row. The state in device memory is loaded in each call, so
// that it takes no registers between calls.
__device__ __forceinline__ uint4 dropout_words(const DropoutParams& dropout, uint32_t batch_head, int row, int col) {
    const auto words = [&](uint32_t seed_low, uint32_t seed_high, uint32_t offset_mix) {
        return philox(make_uint4(static_cast<uint32_t>(col) >> 2, static_cast<uint32_t>(row), batch_head, offset_mix), seed_low,
                      seed_high);
    };
    if (!dropout.state) return words(dropout.seed_low, dropout.seed_high, dropout.offset_mix);
    const uint64_t* state = hide_from_compiler(dropout.state);
    const uint64_t offset = state[1], seed = state[0];
    return words(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                 static_cast<uint32_t>(offset) ^ (static_cast<uint32_t>(offset >> 32) * 0x9E3779B9u));
}

// The words of a row in two neighbouring accumulator blocks, from key `col` (a multiple of 8) on: words[n].x and .y belong to key
// col + 8 * n + 2 * (lane % 4) and to the next key. Two lanes share calls: each makes the call for one block. The whole warp
// calls it.
__device__ __forceinline__ void dropout_words_of_row(const DropoutParams& dropout, uint32_t batch_head, int row, int col,
                                                     int lane, uint2 (&words)[2]) {
    const bool odd = lane & 1;
    const uint4 w = dropout_words(dropout, batch_head, row, col + (odd ? 8 : 0) + (lane >> 1 & 1) * 4);
    const uint32_t other_x = __shfl_xor_sync(0xffffffffu, odd ? w.x : w.z, 1);
    const uint32_t other_y = __shfl_xor_sync(0xffffffffu, odd ? w.y : w.w, 1);
    words[0] = odd ? make_uint2(other_x, other_y) : make_uint2(w.x, w.y);
    words[1] = odd ? make_uint2(w.z, w.w) : make_uint2(other_x, other_y);
}

// The words of a transposed accumulator block: words[e] belongs to row `row` + e % 2 and key col + 8 * (e / 2) + lane / 4, where
// `row` may differ between lanes only by lane % 4 and col is a multiple of 8. Four lanes share four calls: each makes one call,
// and they exchange words as in a 4 x 4 transpose. The whole warp calls it.
__device__ __forceinline__ void dropout_words_transposed(const DropoutParams& dropout, uint32_t batch_head, int row, int col,
                                                         int lane, uint32_t (&words)[4]) {
    const int mine = lane >> 2 & 3;
    const uint4 w = dropout_words(dropout, batch_head, row + (mine & 1), col + (mine >> 1) * 8 + (lane >> 4) * 4);
    words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
#pragma unroll
    for (int bit = 0; bit < 2; ++bit) {
        const bool upper = mine >> bit & 1;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const int low = bit == 0 ? 2 * pair : pair, high = low + (1 << bit);
            const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words[low] : words[high], 4 << bit);
            if (upper) {
                words[low] = other;
            } else {
                words[high] = other;
            }
        }
    }
}

// The number of a head that the counter of the generator contains.
__device__ __forceinline__ uint32_t dropout_head(int batch, int heads_q, int head) {
    return static_cast<uint32_t>(batch) * heads_q + head;
}

// The functions below return a bit for each element: whether it is kept. The generator needs many registers, so it runs in a loop
// that is not unrolled. The whole warp calls them.

// For kRows accumulator rows of this lane, row_of(i), and two neighbouring blocks of 8 keys from col_of(i) on: bit
// i * kRowBits + n * kBlockBits + e belongs to row i and key col_of(i) + 8 * n + 2 * (lane % 4) + e.
template <int kRows, int kRowBits = 4, int kBlockBits = 2, class ColOf, class RowOf>
__device__ __forceinline__ uint32_t keep_bits_at(const DropoutParams& dropout, uint32_t batch_head, int lane, const ColOf& col_of,
                                                 const RowOf& row_of) {
    uint32_t keep = 0;
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) {
        uint2 words[2];
        dropout_words_of_row(dropout, batch_head, row_of(i), col_of(i), lane, words);
#pragma unroll
        for (int n = 0; n < 2; ++n)
            keep |= ((words[n].x >= dropout.threshold ? 1u : 0u) | (words[n].y >= dropout.threshold ? 2u : 0u))
                    << (i * kRowBits + n * kBlockBits);
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

// For kBlocks transposed accumulator blocks of 16 keys and 8 query rows, kSlabs of them side by side along the keys: block i has
// the query rows from row + i / kSlabs * 8 and the keys from col + i % kSlabs * 16 on, as in dropout_words_transposed(). Bit
// i * 4 + e belongs to its element e.
template <int kBlocks, int kSlabs = 2>
__device__ __forceinline__ uint32_t keep_bits_transposed(const DropoutParams& dropout, uint32_t batch_head, int row, int col,
                                                         int lane) {
    uint32_t keep = 0;
#pragma unroll 1
    for (int i = 0; i < kBlocks; ++i) {
        uint32_t words[4];
        dropout_words_transposed(dropout, batch_head, row + i / kSlabs * 8, col + i % kSlabs * 16, lane, words);
#pragma unroll
        for (int e = 0; e < 4; ++e) keep |= (words[e] >= dropout.threshold ? 1u : 0u) << (i * 4 + e);
    }
    return keep;
}

// Where dropout counts positions rather than rows and keys of the tensors, four neighbouring keys need not have words of one
// call. So each element has its own call. position_of(row) and position_of_key(col) give the positions.
template <int kCount, class RowOf, class ColOf>
__device__ __forceinline__ uint32_t keep_bits_of_elements(const DropoutParams& dropout, uint32_t batch_head, const RowOf& row_of,
                                                          const ColOf& col_of) {
    uint32_t keep = 0;
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
        const int col = col_of(i);
        const uint4 w = dropout_words(dropout, batch_head, row_of(i), col);
        const uint32_t low = col & 1 ? w.y : w.x, high = col & 1 ? w.w : w.z;
        keep |= ((col & 2 ? high : low) >= dropout.threshold ? 1u : 0u) << i;
    }
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
