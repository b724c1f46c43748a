// Sums with twice the bits of double: a double and the rest. The compiler makes vectors of them, unlike of long double.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

using Real = long double;

// Adds a product to sum + rest. `lost`: what the product lost by rounding. The error of the addition, which double represents
// exactly, goes to the rest.
__attribute__((always_inline, optimize("O3"))) inline void add_with_rest(double& sum, double& rest, double product, double lost) {
    const double before = sum, after = before + product, added = after - before;
    rest += (before - (after - added)) + (product - added) + lost;
    sum = after;
}

// Adds factor * x[i] to sums[i] + rests[i].
__attribute__((optimize("O3"))) inline void add_exactly(double* __restrict sums, double* __restrict rests, Real factor,
                                                        const double* __restrict x, int count) {
    const double high = static_cast<double>(factor), low = static_cast<double>(factor - high);
    for (int i = 0; i < count; ++i) {
        const double product = high * x[i];
        add_with_rest(sums[i], rests[i], product, std::fma(high, x[i], -product) + low * x[i]);
    }
}

// The sum of a[i] * b[i].
__attribute__((optimize("O3"))) inline Real exact_dot(const double* a, const double* b, int count) {
    constexpr int kSums = 16;  // independent ones
    double sums[kSums] = {}, rests[kSums] = {};
    int i = 0;
    for (; i + kSums <= count; i += kSums)
        for (int n = 0; n < kSums; ++n) {
            const double product = a[i + n] * b[i + n];
            add_with_rest(sums[n], rests[n], product, std::fma(a[i + n], b[i + n], -product));
        }
    Real sum = 0;
    for (int n = 0; n < kSums; ++n) sum += Real{sums[n]} + rests[n];
    for (; i < count; ++i) sum += Real{a[i]} * b[i];
    return sum;
}

class ExactSums {
public:
    void assign(size_t count) { sums_.assign(count, 0), rests_.assign(count, 0); }
    Real operator[](size_t i) const { return Real{sums_[i]} + rests_[i]; }
    // Adds factor * x[0], factor * x[1], ... to the sums from `first` on.
    void add(size_t first, Real factor, const double* x, int count) {
        add_exactly(&sums_[first], &rests_[first], factor, x, count);
    }

private:
    std::vector<double> sums_, rests_;
};
