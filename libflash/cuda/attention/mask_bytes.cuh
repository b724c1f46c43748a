// Loads of a boolean mask, many keys of a row at a time.
#pragma once

#include "cuda/attention/score_rows.cuh"

namespace libflash::cuda {

using MaskRows = ScoreRows<uint8_t>;

// 16 bytes of a row. `whole`: at once, else in words.
__device__ __forceinline__ uint4 load_mask_bytes(const uint8_t* bytes, bool whole) {
    if (whole) return *reinterpret_cast<const uint4*>(bytes);
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(bytes);
    return make_uint4(words[0], words[1], words[2], words[3]);
}
// Bit 7 of each byte of the result is set if this byte of `word` is zero.
__device__ __forceinline__ uint32_t zero_bytes(uint32_t word) {
    return ~(((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
}
// Which of 16 keys are hidden: bit bit_of_key(i) for key i. The other bits are zero.
__device__ __forceinline__ uint32_t hidden_keys(const uint4& bytes) {
    return zero_bytes(bytes.x) >> 7 | zero_bytes(bytes.y) >> 6 | zero_bytes(bytes.z) >> 5 | zero_bytes(bytes.w) >> 4;
}
__device__ __forceinline__ constexpr int bit_of_key(int i) { return i % 4 * 8 + i / 4; }

}  // namespace libflash::cuda
