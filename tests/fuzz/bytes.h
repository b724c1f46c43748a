// Choices read from the fuzzer's bytes; 0 once they are used up, so that every input is a complete case and a shorter input a
// simpler one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace fuzz {

class Bytes {
public:
    Bytes(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

    uint8_t byte() { return at_ < end_ ? *at_++ : 0; }
    // In [0, n), n <= 65536.
    int64_t below(int64_t n) {
        const int64_t value = n <= 256 ? byte() : byte() * 256 + byte();
        return value % n;
    }
    int64_t between(int64_t first, int64_t last) { return first + below(last - first + 1); }
    // True with probability `times` / 256.
    bool chance(int times) { return 255 - byte() < times; }
    template <class T>
    T one_of(std::initializer_list<T> choices) {
        return choices.begin()[below(static_cast<int64_t>(choices.size()))];
    }
    uint32_t word() {
        uint32_t value = 0;
        for (int n = 0; n < 4; ++n) value = value << 8 | byte();
        return value;
    }

private:
    const uint8_t *at_, *end_;
};

// SplitMix64: the values of the tensors, and the inputs of the driver without libFuzzer.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t word() {
        uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
    int64_t below(int64_t n) { return static_cast<int64_t>(word() % static_cast<uint64_t>(n)); }
    // Uniform in [-1, 1).
    double uniform() { return static_cast<double>(word() >> 11) * 0x1p-52 - 1.0; }

private:
    uint64_t state_;
};

// 0 .. n - 1 in random order.
inline std::vector<int32_t> shuffled(int64_t n, Random& random) {
    std::vector<int32_t> order(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
        const auto at = static_cast<size_t>(i), other = static_cast<size_t>(random.below(i + 1));
        order[at] = order[other];
        order[other] = static_cast<int32_t>(i);
    }
    return order;
}

}  // namespace fuzz
