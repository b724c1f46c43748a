// The values of the codes of an 8-bit KV cache as 16-bit numbers, exact in both types, NaN and infinities included.
#pragma once

#include "cuda/attention/cache_params.h"
#include "cuda/ptx/codes.cuh"

#include <type_traits>

namespace libflash::cuda {

__device__ __forceinline__ uint32_t pair_of_halves(uint32_t halves, __half) { return halves; }
__device__ __forceinline__ uint32_t pair_of_halves(uint32_t halves, __nv_bfloat16) {
    return pack_pair(low_of(halves, __half()), high_of(halves, __half()), __nv_bfloat16());
}

// Bytes 0 and 2 (int8) of `four`, as a pair of bfloat16. Computes 128 plus the last seven bits of a byte, then subtracts 128 or,
// for a negative number, 256.
__device__ __forceinline__ uint32_t bfloats_of_low_bytes(uint32_t four) {
    return subtract_pair((four & 0x007f007fu) | 0x43004300u, (four & 0x00800080u) | 0x43004300u, __nv_bfloat16());
}

// Converts codes 2 * kPair and 2 * kPair + 1 of `four`. kCode: their type.
template <CodeType kCode, int kPair, class T>
__device__ __forceinline__ uint32_t values_of_codes(uint32_t four, T) {
    if constexpr (kCode == CodeType::e4m3) {
        return pair_of_halves(halves_of_e4m3<kPair>(four), T());
    } else if constexpr (kCode == CodeType::e5m2) {
        return pair_of_halves(select_bytes(four, 0, kPair == 0 ? 0x1404 : 0x3424), T());  // the high byte of a half
    } else if constexpr (std::is_same_v<T, __half>) {
        return halves_of_int8<kPair>(four);
    } else {
        // 2^23 + 128 + x as a float has the code x + 128 in its lowest byte.
        const uint32_t shifted = four ^ 0x80808080u;
        const auto one = [&](uint32_t order) { return float_of(select_bytes(shifted, 0x4b000000u, order)) - 8388736.0f; };
        return kPair == 0 ? pack_pair(one(0x7650), one(0x7651), T()) : pack_pair(one(0x7652), one(0x7653), T());
    }
}

// Converts codes kFirst and kFirst + 2 of `four`.
template <CodeType kCode, int kFirst, class T>
__device__ __forceinline__ uint32_t values_of_every_second(uint32_t four, T) {
    if constexpr (kCode == CodeType::e5m2) {
        return pair_of_halves(select_bytes(four, 0, kFirst == 0 ? 0x2404 : 0x3414), T());
    } else if constexpr (kCode == CodeType::int8) {
        if constexpr (std::is_same_v<T, __half>) return halves_of_int8(four, kFirst == 0 ? 0x4240 : 0x4341);
        return bfloats_of_low_bytes(kFirst == 0 ? four : four >> 8);
    } else {
        return values_of_codes<kCode, kFirst>(select_bytes(four, 0, 0x3120), T());
    }
}

// Converts sixteen codes to sixteen numbers.
template <CodeType kCode, class T>
__device__ __forceinline__ void widen_codes(const uint4& codes, uint4& low, uint4& high, T) {
    low = {values_of_codes<kCode, 0>(codes.x, T()), values_of_codes<kCode, 1>(codes.x, T()),
           values_of_codes<kCode, 0>(codes.y, T()), values_of_codes<kCode, 1>(codes.y, T())};
    high = {values_of_codes<kCode, 0>(codes.z, T()), values_of_codes<kCode, 1>(codes.z, T()),
            values_of_codes<kCode, 0>(codes.w, T()), values_of_codes<kCode, 1>(codes.w, T())};
}

}  // namespace libflash::cuda
