// The storage types and their exact conversions in integer arithmetic: round to nearest, ties to even; subnormals are kept,
// overflow becomes infinity, NaN stays NaN. tests/cpu/test_convert.cpp checks every bit pattern.
//
// Everything here has internal linkage. The engine includes this file under several sets of compiler flags; if a function were
// an ordinary inline function, the linker could keep the copy compiled for AVX-512 for all callers.
#pragma once

#include <cstdint>
#include <cstring>

#include "problem/tensor.h"

namespace libflash::cpu {

struct half {
    uint16_t bits;
};
struct bfloat16 {
    uint16_t bits;
};

// The types of 8-bit KV caches. Every value is exact in half and in bfloat16.
struct e4m3 {
    uint8_t bits;
};
struct e5m2 {
    uint8_t bits;
};
struct int8 {
    int8_t value;
};

namespace {

// Rounds a double to a float format with kExponent exponent bits and kMantissa mantissa bits, whose largest exponent is kTop.
// Floats may be passed as doubles: the conversion is exact.
template <int kExponent, int kMantissa, int kTop = (1 << (kExponent - 1)) - 1>
inline uint16_t narrow(double value) {
    constexpr int kBias = (1 << (kExponent - 1)) - 1;
    constexpr uint64_t kInfinity = uint64_t{(1 << kExponent) - 1} << kMantissa;
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint64_t sign = (bits >> 63) << (kExponent + kMantissa);
    const uint64_t fraction = bits & ((uint64_t{1} << 52) - 1);
    const int biased = static_cast<int>(bits >> 52 & 0x7ff);
    if (biased == 0x7ff) {
        const uint64_t quiet = uint64_t{1} << (kMantissa - 1) | fraction >> (52 - kMantissa);
        return static_cast<uint16_t>(sign | kInfinity | (fraction ? quiet : 0));
    }
    const int exponent = biased - 1023;
    const uint64_t significand = fraction | uint64_t{biased != 0} << 52;
    const int below = exponent < 1 - kBias ? 1 - kBias - exponent : 0;  // bits lost to a subnormal result
    const int drop = below < 2 + kMantissa ? 52 - kMantissa + below : 54;
    uint64_t kept = significand >> drop;
    const uint64_t rest = significand - (kept << drop), tie = uint64_t{1} << (drop - 1);
    if (rest > tie || (rest == tie && (kept & 1))) ++kept;
    // The leading bit of a normal significand adds the missing 1 to the exponent; a carry out of the fraction increments it.
    if (below == 0) {
        if (exponent > kTop) return static_cast<uint16_t>(sign | kInfinity);
        kept += static_cast<uint64_t>(exponent + kBias - 1) << kMantissa;
    }
    return static_cast<uint16_t>(sign | kept);
}

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }

inline float widen(bfloat16 value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }

inline float widen(half value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits >> 15) << 31;
    const uint32_t exponent = value.bits >> 10 & 0x1f, fraction = value.bits & 0x3ff;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    const uint32_t wide = exponent == 0x1f ? 0xff : exponent + (127 - 15);
    return float_of_bits(sign | wide << 23 | fraction << 13);
}

inline float widen(e5m2 value) { return widen(half{static_cast<uint16_t>(value.bits << 8)}); }
inline float widen(e4m3 value) {
    const uint16_t sign = static_cast<uint16_t>((value.bits & 0x80) << 8), magnitude = value.bits & 0x7f;
    if (magnitude == 0x7f) return widen(half{static_cast<uint16_t>(sign | 0x7e00)});
    return widen(half{static_cast<uint16_t>(sign | magnitude << 7)}) * 256;  // the exponent of half has a bias larger by 8
}
inline float widen(int8 value) { return value.value; }

// The largest finite value of an 8-bit type.
template <class C>
constexpr float kLargestCode = 127;
template <>
constexpr float kLargestCode<e4m3> = 448;
template <>
constexpr float kLargestCode<e5m2> = 57344;

inline double clamped(double value, double largest) { return value > largest ? largest : value < -largest ? -largest : value; }

// These round to nearest, ties to even. Values beyond the largest finite value, infinities too, become the largest finite value.
// NaN stays NaN; int8 has no NaN and gets 0.
inline void store(e5m2& to, double value) { to.bits = static_cast<uint8_t>(narrow<5, 2>(clamped(value, kLargestCode<e5m2>))); }
inline void store(e4m3& to, double value) {
    to.bits = value != value ? 0x7f : static_cast<uint8_t>(narrow<4, 3, 8>(clamped(value, kLargestCode<e4m3>)));
}
inline void store(int8& to, double value) {
    const double inside = value == value ? clamped(value, kLargestCode<int8>) : 0;
    int whole = static_cast<int>(inside);
    const double rest = inside - whole;
    if (rest > 0.5 || (rest == 0.5 && whole % 2 != 0)) ++whole;
    if (rest < -0.5 || (rest == -0.5 && whole % 2 != 0)) --whole;
    to.value = static_cast<int8_t>(whole);
}

inline void store(half& to, double value) { to.bits = narrow<5, 10>(value); }
inline void store(bfloat16& to, double value) { to.bits = narrow<8, 7>(value); }
inline void store(float& to, double value) { to = static_cast<float>(value); }
inline void store(double& to, double value) { to = value; }

// Element `index` of an array of any floating type.
inline double load_as(DType dtype, const void* data, int64_t index) {
    switch (dtype) {
        case DType::f16: return widen(static_cast<const half*>(data)[index]);
        case DType::bf16: return widen(static_cast<const bfloat16*>(data)[index]);
        case DType::f32: return static_cast<const float*>(data)[index];
        case DType::e4m3: return widen(static_cast<const e4m3*>(data)[index]);
        case DType::e5m2: return widen(static_cast<const e5m2*>(data)[index]);
        case DType::i8: return widen(static_cast<const int8*>(data)[index]);
        default: return static_cast<const double*>(data)[index];
    }
}

inline void store_as(DType dtype, void* data, int64_t index, double value) {
    switch (dtype) {
        case DType::f16: return store(static_cast<half*>(data)[index], value);
        case DType::bf16: return store(static_cast<bfloat16*>(data)[index], value);
        case DType::f32: return store(static_cast<float*>(data)[index], value);
        default: return store(static_cast<double*>(data)[index], value);
    }
}

// Calls body with a null pointer of the C++ type of a floating dtype.
template <class Body>
inline void with_type(DType dtype, const Body& body) {
    switch (dtype) {
        case DType::f16: return body(static_cast<half*>(nullptr));
        case DType::bf16: return body(static_cast<bfloat16*>(nullptr));
        case DType::f32: return body(static_cast<float*>(nullptr));
        default: return body(static_cast<double*>(nullptr));
    }
}

// The same for the type of a KV cache: an 8-bit type, or that of q.
template <class Body>
inline void with_cache_type(DType dtype, const Body& body) {
    switch (dtype) {
        case DType::e4m3: return body(static_cast<e4m3*>(nullptr));
        case DType::e5m2: return body(static_cast<e5m2*>(nullptr));
        case DType::i8: return body(static_cast<int8*>(nullptr));
        default: return with_type(dtype, body);
    }
}

}  // namespace
}  // namespace libflash::cpu
