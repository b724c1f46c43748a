// The boolean mask of transposed scores as bits. In the layout of wgmma a lane has scores of 16 query rows of a tile and of two
// keys, so loads of single bytes of the mask would be many and short. Here each lane loads whole rows of the warp's 16 keys, a
// bit for each byte, and the lanes exchange them.
#pragma once

#include "cuda/attention/mask_bytes.cuh"

namespace libflash::cuda {

// hidden_keys() of a row. Rows that do not exist hide none.
__device__ __forceinline__ uint32_t hidden_keys_of_row(const MaskRows& mask, int row, bool whole) {
    return row < mask.rows ? hidden_keys(load_mask_bytes(mask.first + row * mask.row_stride, whole)) : 0;
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

// Bit i is set if the mask hides element i of a lane: query row row + 8 * (i / 4) + 2 * (lane % 4) + i % 2, key lane / 4 +
// 8 * (i / 2 % 2) of the warp's. kRows: 32 or 64. The whole warp calls it.
template <int kRows>
__device__ __forceinline__ uint32_t hidden_bits(const MaskRows& mask, int row, int lane) {
    static_assert(kRows == 32 || kRows == 64, "one or two rows of each lane");
    const bool whole = mask.loads(16, 16);
    if (!whole && !mask.loads(16, 4)) {
        uint32_t hidden = 0;
        mask.for_transposed_elements<kRows>(row, lane, [&](int i, uint8_t shows) { hidden |= shows ? 0u : 1u << i; });
        return hidden;
    }
    uint32_t rows = hidden_keys_of_row(mask, row + lane, whole);
    if constexpr (kRows == 64) rows |= hidden_keys_of_row(mask, row + 32 + lane, whole) << 4;
    return transposed_bits(rows, lane);
}

}  // namespace libflash::cuda
