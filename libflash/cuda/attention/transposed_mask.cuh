// The boolean mask of transposed scores (tile/accumulator.cuh) as bits. A lane has scores of a quarter of the query rows and of
// two keys, so it would need one load for each byte of the mask. Here each lane loads 16 bytes, the warp's keys in one row,
// reduces them to bits, and the lanes exchange the bits.
#pragma once

#include "cuda/attention/mask_bytes.cuh"

namespace libflash::cuda {

// As load_mask_bytes(), whatever the strides. Bytes of keys that do not exist are not zero.
__device__ __forceinline__ uint4 load_single_mask_bytes(const uint8_t* bytes, int64_t stride, int keys) {
    uint32_t words[4] = {~0u, ~0u, ~0u, ~0u};
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i < keys && !bytes[i * stride]) words[i / 4] &= ~(0xffu << i % 4 * 8);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The lane's bits from those of all rows: lane n has hidden_keys() of row n, and four bits higher those of row n + 32.
__device__ __forceinline__ uint32_t transposed_bits(uint32_t rows, int lane) {
    uint32_t hidden = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = i / 2 * 8 + (lane & 3) * 2 + i % 2;
        const uint32_t found = __shfl_sync(0xffffffffu, rows, row) >> bit_of_key(lane >> 2);  // and of key + 8 two bits higher
        hidden |= ((found & 5u) | (found & 0x50u) << 12) << (i / 2 * 4 + i % 2);
    }
    return hidden;
}

// The mask of kRows query rows, 32 or 64, and of the warp's 16 keys. The whole warp calls the functions.
template <int kRows>
struct TransposedMask {
    static_assert(kRows == 32 || kRows == 64, "one or two rows of each lane");
    uint4 rows[kRows / 32];

    // Begins to load the rows from `row` on. Rows that do not exist hide nothing.
    __device__ __forceinline__ void load(const MaskRows& mask, int row, int lane) {
        const bool whole = mask.loads(16, 16), words = mask.loads(16, 4);
#pragma unroll
        for (int i = 0; i < kRows / 32; ++i) {
            const int own = row + 32 * i + lane;
            const uint8_t* const bytes = mask.first + own * mask.row_stride;
            if (own >= mask.rows) {
                rows[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
            } else if (whole || words) {
                rows[i] = load_mask_bytes(bytes, whole);
            } else {
                rows[i] = load_single_mask_bytes(bytes, mask.key_stride, mask.keys);
            }
        }
    }
    // Bit i is set if the mask hides element i of the lane's scores.
    __device__ __forceinline__ uint32_t hidden(int lane) const {
        uint32_t keys = 0;
#pragma unroll
        for (int i = 0; i < kRows / 32; ++i) keys |= hidden_keys(rows[i]) << 4 * i;
        return transposed_bits(keys, lane);
    }
};

// What TransposedMask::hidden() returns, with fewer registers: with 256 channels the consumers have none to spare. The whole warp
// calls it.
template <int kRows>
__device__ __forceinline__ uint32_t hidden_bits(const MaskRows& mask, int row, int lane) {
    uint32_t hidden = 0;
    const bool whole = mask.loads(16, 16);
    if (!whole && !mask.loads(16, 4)) {
        mask.for_transposed_elements<kRows>(row, lane, [&](int i, uint8_t shows) { hidden |= shows ? 0u : 1u << i; });
        return hidden;
    }
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i) {
        const int own = row + 32 * i + lane;
        if (own < mask.rows) hidden |= hidden_keys(load_mask_bytes(mask.first + own * mask.row_stride, whole)) << 4 * i;
    }
    return transposed_bits(hidden, lane);
}

}  // namespace libflash::cuda
