// Conversion of 8-bit codes to pairs of 16-bit numbers. Every value of a code is exact in both 16-bit types.
#pragma once

#include "cuda/ptx/math.cuh"

namespace libflash::cuda {

// Codes 2 * kPair and 2 * kPair + 1 of e4m3 to a pair of halves.
template <int kPair>
__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t four) {
#if __CUDA_ARCH__ >= 900
    uint32_t pair;  // the conversion reads the low or the high half of a register
    if (kPair == 0) {
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(pair) : "r"(four));
    } else {
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(pair) : "r"(four));
    }
    return pair;
#else
    const uint32_t codes = four >> 16 * kPair;
    // The exponent of half has a bias larger by 8. The magnitude 0x7f is NaN.
    const auto one = [](uint32_t code) {
        const uint32_t magnitude = code & 0x7f, bits = magnitude == 0x7f ? 0x7e00 : magnitude << 7;
        return __half2float(__ushort_as_half(static_cast<unsigned short>((code & 0x80) << 8 | bits))) * 256.0f;
    };
    return pack_pair(one(codes & 0xff), one(codes >> 8 & 0xff), __half());
#endif
}

// PRMT: byte i of the result is the byte whose number is nibble i of `order`; numbers 0 to 3 are the bytes of `x`, 4 to 7 those
// of `y`.
__device__ __forceinline__ uint32_t select_bytes(uint32_t x, uint32_t y, uint32_t order) { return __byte_perm(x, y, order); }

// x - y.
__device__ __forceinline__ uint32_t subtract_pair(uint32_t x, uint32_t y, __half) {
    uint32_t pair;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(x), "r"(y));
    return pair;
}
__device__ __forceinline__ uint32_t subtract_pair(uint32_t x, uint32_t y, __nv_bfloat16) {
    uint32_t pair;  // y * -1 + x
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(y), "r"(0xbf80bf80u), "r"(x));
    return pair;
}

// Two of the four int8 codes x to a pair of halves. A half with high byte 0x64 and low byte x + 128 is 1024 + 128 + x; 1152 is
// subtracted from it. `order` selects the two codes, as in select_bytes(); number 4 is the high byte.
__device__ __forceinline__ uint32_t halves_of_int8(uint32_t four, uint32_t order) {
    return subtract_pair(select_bytes(four ^ 0x80808080u, 0x64646464u, order), 0x64806480u, __half());
}
// The same for codes 2 * kPair and 2 * kPair + 1.
template <int kPair>
__device__ __forceinline__ uint32_t halves_of_int8(uint32_t four) {
    return halves_of_int8(four, kPair == 0 ? 0x4140 : 0x4342);
}

}  // namespace libflash::cuda
