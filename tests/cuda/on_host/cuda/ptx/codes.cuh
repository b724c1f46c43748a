// Replaces the library's header.
#pragma once

#include "cuda/ptx/math.cuh"
#include "emulation.h"

namespace libflash::cuda {

template <int kPair>
uint32_t halves_of_e4m3(uint32_t four) {
    const uint32_t codes = four >> 16 * kPair;
    const auto value = [](uint32_t code) -> float {
        const int exponent = code >> 3 & 15, fraction = code & 7;
        const float size = (code & 0x7f) == 0x7f ? NAN
                           : exponent == 0       ? std::ldexp(fraction / 8.0f, -6)
                                                 : std::ldexp(1 + fraction / 8.0f, exponent - 7);
        return code & 0x80 ? -size : size;
    };
    return pack_pair(value(codes & 0xff), value(codes >> 8 & 0xff), __half());
}

inline uint32_t select_bytes(uint32_t x, uint32_t y, uint32_t order) {
    const uint64_t both = uint64_t{y} << 32 | x;
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= static_cast<uint32_t>(both >> (order >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return bytes;
}

// Nibbles 0 and 2 of `order` name the codes.
inline uint32_t halves_of_int8(uint32_t four, uint32_t order) {
    const auto value = [&](uint32_t i) { return static_cast<float>(static_cast<int8_t>(four >> 8 * i)); };
    return pack_pair(value(order & 3), value(order >> 8 & 3), __half());
}
template <int kPair>
uint32_t halves_of_int8(uint32_t four) {
    return halves_of_int8(four, kPair == 0 ? 0x4140 : 0x4342);
}

template <class T>
uint32_t subtract_pair(uint32_t x, uint32_t y, T) {
    return pack_pair(low_of(x, T()) - low_of(y, T()), high_of(x, T()) - high_of(y, T()), T());
}

}  // namespace libflash::cuda
