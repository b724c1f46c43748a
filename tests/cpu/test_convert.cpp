// Compares the conversions of cpu/convert.h with the definition for every bit pattern: 2^16 widenings of each 16-bit type, all
// 2^32 floats rounded to each. The nearest value is found with the midpoints of neighbouring values, which double represents
// exactly.
//
//   test_convert [threads]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <thread>
#include <vector>

#include "cpu/convert.h"

using namespace libflash::cpu;

namespace {

// A 16-bit format by the definition of IEEE 754, computed with arithmetic instead of bit operations.
struct Format {
    const char* name;
    int exponent, mantissa;

    int bias() const { return (1 << (exponent - 1)) - 1; }
    uint32_t infinity() const { return ((1u << exponent) - 1) << mantissa; }
    bool nan(uint32_t bits) const { return (bits & 0x7fff) > infinity(); }
    double value(uint32_t bits) const {
        const int e = static_cast<int>((bits & 0x7fff) >> mantissa);
        const double fraction = static_cast<double>(bits & ((1u << mantissa) - 1)) * std::ldexp(1.0, -mantissa);
        const double magnitude = e == 0 ? std::ldexp(fraction, 1 - bias()) : std::ldexp(1.0 + fraction, e - bias());
        return bits >> 15 ? -magnitude : magnitude;
    }
};

// For each non-negative bit pattern the values that round to it: from `low` to `high`, bounds included if the pattern is even.
struct Nearest {
    std::vector<double> low, high;

    explicit Nearest(const Format& format) {
        const uint32_t infinity = format.infinity();
        low.resize(infinity + 1), high.resize(infinity + 1);
        for (uint32_t bits = 0; bits <= infinity; ++bits) {
            // For rounding, infinity counts as the next power of two after the largest number.
            low[bits] = bits ? (format.value(bits - 1) + format.value(bits)) / 2 : 0;
            high[bits] =
                bits < infinity ? (format.value(bits) + format.value(bits + 1)) / 2 : std::numeric_limits<double>::infinity();
        }
    }
    bool holds(uint32_t bits, double magnitude) const {
        if (bits & 1) return magnitude > low[bits] && magnitude < high[bits];
        return magnitude >= low[bits] && magnitude <= high[bits];
    }
};

template <class T>
uint64_t widening_errors(const Format& format) {
    uint64_t errors = 0;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const float got = widen(T{static_cast<uint16_t>(bits)});
        const uint32_t magnitude = bits & 0x7fff;
        bool good;
        if (format.nan(bits)) {
            good = std::isnan(got);
        } else if (magnitude == format.infinity()) {
            good = std::isinf(got) && std::signbit(got) == (bits >> 15 != 0);
        } else {
            good = static_cast<double>(got) == format.value(bits) && std::signbit(got) == (bits >> 15 != 0);
        }
        errors += !good;
    }
    return errors;
}

template <class T>
uint64_t narrowing_errors(const Format& format, const Nearest& nearest, uint64_t first, uint64_t last) {
    uint64_t errors = 0;
    for (uint64_t pattern = first; pattern < last; ++pattern) {
        const float x = float_of_bits(static_cast<uint32_t>(pattern));
        T got;
        store(got, static_cast<double>(x));
        const bool good = std::isnan(x) ? format.nan(got.bits)
                                        : (got.bits >> 15) == (pattern >> 31) && !format.nan(got.bits) &&
                                              nearest.holds(got.bits & 0x7fff, std::fabs(static_cast<double>(x)));
        errors += !good;
    }
    return errors;
}

// Doubles at and next to every midpoint. Rounding to float first would fail here.
template <class T>
uint64_t double_errors(const Format& format, const Nearest& nearest) {
    uint64_t errors = 0;
    for (uint32_t bits = 0; bits < format.infinity(); ++bits)
        for (double x :
             {nearest.high[bits], std::nextafter(nearest.high[bits], 0.0), std::nextafter(nearest.high[bits], 1e300)}) {
            T got;
            store(got, x);
            errors += !nearest.holds(got.bits, x);
        }
    return errors;
}

template <class T>
uint64_t test_format(const Format& format, int threads) {
    const Nearest nearest(format);
    std::vector<uint64_t> errors(static_cast<size_t>(threads));
    std::vector<std::thread> workers;
    constexpr uint64_t kAll = uint64_t{1} << 32;
    for (int t = 0; t < threads; ++t)
        workers.emplace_back([&, t] {
            const auto from = kAll * static_cast<uint64_t>(t) / static_cast<uint64_t>(threads);
            const auto to = kAll * (static_cast<uint64_t>(t) + 1) / static_cast<uint64_t>(threads);
            errors[static_cast<size_t>(t)] = narrowing_errors<T>(format, nearest, from, to);
        });
    for (std::thread& worker : workers) worker.join();
    uint64_t narrowing = 0;
    for (uint64_t n : errors) narrowing += n;
    const uint64_t widening = widening_errors<T>(format), doubles = double_errors<T>(format, nearest);
    std::printf(
        "%s: widening 65536 patterns, %llu wrong; narrowing 4294967296 floats, %llu wrong; doubles by midpoints, %llu wrong\n",
        format.name, static_cast<unsigned long long>(widening), static_cast<unsigned long long>(narrowing),
        static_cast<unsigned long long>(doubles));
    return widening + narrowing + doubles;
}

}  // namespace

int main(int argc, char** argv) {
    const int given = argc > 1 ? std::atoi(argv[1]) : static_cast<int>(std::thread::hardware_concurrency());
    const int threads = given > 0 ? given : 1;
    const uint64_t errors = test_format<half>({"fp16", 5, 10}, threads) + test_format<bfloat16>({"bf16", 8, 7}, threads);
    return errors == 0 ? 0 : 1;
}
