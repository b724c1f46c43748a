// The boolean mask of transposed scores as bits. In the layout of wgmma a lane has scores of 16 query rows of a tile and of two
// keys, so loads of single bytes of the mask would be many and short. Here each lane loads whole rows of the warp's 16 keys, a
// bit for each byte, and the lanes exchange them.
#pragma once

#include "cuda/attention/params.h"

namespace libflash::cuda {

// The mask of one head from a warp's first key on: rows of 16 keys.
struct MaskRows {
    const uint8_t* first;  // row 0 of the sequence, the warp's first key
    int64_t row_stride, key_stride;
    int rows, keys;  // how many there are, from there on

    __device__ __forceinline__ MaskRows(const ScoreParams& mask, int batch, int head, int first_key, int length_q, int length_k)
        : first(static_cast<const uint8_t*>(mask.data) + batch * mask.stride[0] + head * mask.stride[1] +
                first_key * mask.stride[3]),
          row_stride(mask.stride[2]), key_stride(mask.stride[3]), rows(length_q), keys(length_k - first_key) {}

    // Whether all 16 keys of each row can be loaded, `bytes` at a time.
    __device__ __forceinline__ bool loads(int bytes) const {
        const int64_t places = reinterpret_cast<int64_t>(first) | row_stride;
        return key_stride == 1 && keys >= 16 && (places & (bytes - 1)) == 0;
    }
};

// Bit n of the result is set if byte n of `word` is zero.
__device__ __forceinline__ uint32_t zero_bytes(uint32_t word) {
    const uint32_t low = word & 0x7f7f7f7fu;
    const uint32_t zero = ~((low + 0x7f7f7f7fu) | word) >> 7 & 0x01010101u;  // 1 in each byte that is zero
    return zero * 0x10204080u >> 28;
}

// Which of the 16 keys a row hides: a bit each. Rows that do not exist hide none.
__device__ __forceinline__ uint32_t hidden_keys(const MaskRows& mask, int row, bool whole) {
    if (row >= mask.rows) return 0;
    uint4 bytes;
    if (whole) {
        bytes = *reinterpret_cast<const uint4*>(mask.first + row * mask.row_stride);
    } else {
        const uint32_t* const words = reinterpret_cast<const uint32_t*>(mask.first + row * mask.row_stride);
        bytes = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return zero_bytes(bytes.x) | zero_bytes(bytes.y) << 4 | zero_bytes(bytes.z) << 8 | zero_bytes(bytes.w) << 12;
}

// The lane's bits from those of all rows: lane n has row n in the low half of `rows`, row n + 32 in the high half.
__device__ __forceinline__ uint32_t transposed_bits(uint32_t rows, int lane) {
    uint32_t hidden = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = i / 2 * 8 + (lane & 3) * 2 + i % 2;
        const uint32_t found = __shfl_sync(0xffffffffu, rows, row) >> (lane >> 2) & 0x01010101u;
        hidden |= ((found | found >> 6) & 0x00050005u) << (i / 2 * 4 + i % 2);
    }
    return hidden;
}

// Byte by byte, whatever the strides.
template <int kRows>
__device__ __forceinline__ uint32_t hidden_bits_by_byte(const MaskRows& mask, int row, int lane) {
    uint32_t hidden = 0;
#pragma unroll 8
    for (int i = 0; i < kRows / 2; ++i) {
        const int at = row + i / 4 * 8 + (lane & 3) * 2 + i % 2, key = (lane >> 2) + i / 2 % 2 * 8;
        const bool exists = at < mask.rows && key < mask.keys;
        if (exists && !mask.first[at * mask.row_stride + key * mask.key_stride]) hidden |= 1u << i;
    }
    return hidden;
}

// Bit i is set if the mask hides element i of a lane: query row row + 8 * (i / 4) + 2 * (lane % 4) + i % 2, key lane / 4 +
// 8 * (i / 2 % 2) of the warp's. kRows: 32 or 64. The whole warp calls it.
template <int kRows>
__device__ __forceinline__ uint32_t hidden_bits(const MaskRows& mask, int row, int lane) {
    static_assert(kRows == 32 || kRows == 64, "one or two rows of each lane");
    const bool whole = mask.loads(16);
    if (!whole && !mask.loads(4)) return hidden_bits_by_byte<kRows>(mask, row, lane);
    uint32_t rows = hidden_keys(mask, row + lane, whole);
    if constexpr (kRows == 64) rows |= hidden_keys(mask, row + 32 + lane, whole) << 16;
    return transposed_bits(rows, lane);
}

}  // namespace libflash::cuda
